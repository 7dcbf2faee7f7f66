"""The names that published checkpoints have for the parameters of transformers' modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightTransform,
    revert_weight_conversion,
)

from headstock.spi import ParamSpec
from headstock_transformers.module import in_one_line


def find_sources(model: PreTrainedModel) -> dict[str, ParamSpec]:
    """Each tensor that checkpoints have, by the module's name for it.   raises: ValueError

    Roles and types are left to the caller.
    """
    # Turned round: by a module's name they find those of checkpoints.
    undone = [
        each.reverse_transform()
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(each, PrefixChange)
    ]
    return {
        name: _find_source(model, undone, name, tensor)
        for name, tensor in model.state_dict().items()
    }


def _find_source(
    model: PreTrainedModel, undone: list[WeightTransform], name: str, tensor: Tensor
) -> ParamSpec:
    """The published tensors that make up one of the module's.   raises: ValueError"""
    shape = tuple(tensor.shape)
    matching = [each for each in undone if each.rename_source_key(name)[1]]
    if not matching:
        return ParamSpec(shape=shape, sources=((name,),))
    converter = next((each for each in matching if isinstance(each, WeightConverter)), None)
    try:
        stored = revert_weight_conversion(model, {name: tensor})
    except Exception as error:
        raise ValueError(f"no tensors make up {name}: {in_one_line(error)}") from error
    if converter is None:
        if [tuple(each.shape) for each in stored.values()] != [shape]:
            raise ValueError(f"the tensors {_first(stored)} do not make up {name}")
        published = next(iter(stored))
        return ParamSpec(
            shape=shape,
            sources=((published,),),
            copies=() if published == name else (name,),
        )
    rows = _read_rows(converter, stored)
    if rows is None:
        raise ValueError(f"it is not known how the tensors {_first(stored)} make up {name}")
    return ParamSpec(shape=shape, sources=rows, stacked=True, whole=name)


def _read_rows(
    converter: WeightTransform, stored: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], ...] | None:
    """The names of each expert's tensors, which are joined on their rows; None for another make."""
    # The converter is turned round: what checkpoints are made of comes last.
    made = [_forward_kind(each) for each in getattr(converter, "operations", ())]
    if made not in ([(MergeModulelist, 0)], [(Concatenate, 1), (MergeModulelist, 0)]):
        return None
    rows: dict[str, list[str]] = {}
    for name in _in_order(converter, stored):
        numbers = re.findall(r"\.(\d+)\.", name)
        if not numbers:
            return None
        rows.setdefault(numbers[-1], []).append(name)
    wanted = len(converter.target_patterns)
    if sorted(map(int, rows)) != list(range(len(rows))):
        return None
    ordered = tuple(tuple(rows[str(number)]) for number in range(len(rows)))
    return ordered if all(len(row) == wanted for row in ordered) else None


def _in_order(converter: WeightTransform, stored: Mapping[str, Tensor]) -> Iterator[str]:
    """The names, those of the first pattern first."""
    for pattern in converter.target_patterns:
        end = pattern.rpartition("*")[2]
        yield from (name for name in stored if name.endswith(end.replace("\\", "")))


def _forward_kind(operation: object) -> tuple[type, int]:
    """What an operation undoes, and on which dimension."""
    undone = getattr(operation, "reverse_op")  # noqa: B009
    return type(undone), int(getattr(undone, "dim", -1))


def _first(names: Mapping[str, Tensor]) -> str:
    """The first of the names."""
    listed = list(names)
    return ", ".join(listed[:2]) + (", ..." if len(listed) > 2 else "")
