"""The cases of a logits processor: neutral rows, rows by themselves, and the best token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock import registry
from headstock.conformance.case import Case
from headstock.conformance.ops.cases import noise
from headstock.spi import DeviceEnv, LogitColumn, LogitsProcessor, LogitsSpec

ROWS, VOCAB = 5, 90


@frozen(kw_only=True)
class Subject:
    """A processor, made with its default options, and where its tensors are."""

    spec: LogitsSpec
    processor: LogitsProcessor
    device: str

    def neutral_columns(self) -> dict[str, Tensor]:
        """The columns of rows that ask for nothing."""
        return {name: fill(column, self.device) for name, column in self.processor.columns.items()}

    def draw(self) -> tuple[Tensor, Tensor]:
        """Logits and positions; some tokens are ruled out."""
        logits = noise(ROWS, VOCAB, dtype=torch.float32, device=self.device, scale=3.0)
        logits[1, ::7] = -torch.inf
        return logits, torch.arange(ROWS, device=self.device) * 11 + 3


def fill(column: LogitColumn, device: str) -> Tensor:
    """A column of neutral values."""
    shape = (ROWS, column.width) if column.width else (ROWS,)
    return torch.full(shape, column.neutral, dtype=getattr(torch, column.dtype), device=device)


def list_cases(spec: LogitsSpec, env: DeviceEnv) -> tuple[Case, ...]:
    """All cases of a processor, with neutral values; what requests may ask is its author's."""
    named: dict[str, Callable[[Subject], object]] = {
        "the columns stay the same": check_columns,
        "a request that gives no argument": check_row,
        "neutral rows stay as they are": check_neutral,
        "shape and type of the logits": check_shape,
        "a row depends on itself alone": check_rows_alone,
    }
    return tuple(
        Case(name, partial(run_with, spec, env.device, run)) for name, run in named.items()
    )


def run_with(spec: LogitsSpec, device: str, run: Callable[[Subject], object]) -> None:
    """Make the processor as the engine does, and run a case.   raises: PluginBroken, ValueError"""
    options = () if spec.options is None else (registry.make_options(spec, ()),)
    processor = registry.make_part(spec, LogitsProcessor, *options)
    run(Subject(spec=spec, processor=processor, device=device))


def check_columns(subject: Subject) -> None:
    """Memory and graphs are planned for them."""
    first, second = dict(subject.processor.columns), dict(subject.processor.columns)
    assert first == second, "columns give other arguments when they are asked again"
    for name, column in first.items():
        assert isinstance(column, LogitColumn), f"the column {name!r} is no LogitColumn"
    assert isinstance(subject.processor.changes_argmax, bool), "changes_argmax is no bool"


def check_row(subject: Subject) -> None:
    """A request that says nothing gets neutral values."""
    prompt = np.arange(12, dtype=np.int32)
    prompt.setflags(write=False)
    values: Mapping[str, Any] | None = subject.processor.row(None, prompt, VOCAB)
    unknown = set(values or {}) - set(subject.processor.columns)
    assert not unknown, f"row gives values of {sorted(unknown)}, which are no columns"
    assert np.array_equal(prompt, np.arange(12)), "row writes to the prompt"


def check_neutral(subject: Subject) -> None:
    """Rows beside one that asks must not change."""
    logits, at = subject.draw()
    found = subject.processor.apply(logits.clone(), at, subject.neutral_columns())
    wrong = (found != logits).any(-1)
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {ROWS} rows with neutral values change"


def check_shape(subject: Subject) -> None:
    """Samplers read float32 of the whole vocabulary."""
    logits, at = subject.draw()
    found = subject.processor.apply(logits.clone(), at, subject.neutral_columns())
    assert found.shape == logits.shape, f"apply returns {tuple(found.shape)} for {(ROWS, VOCAB)}"
    assert found.dtype == torch.float32, f"apply returns {found.dtype}, wanted float32"


def check_rows_alone(subject: Subject) -> None:
    """The same row gives the same scores beside any others, and more often than once."""
    logits, at = subject.draw()
    columns = subject.neutral_columns()
    together = subject.processor.apply(logits.clone(), at, columns)
    picked = torch.tensor([3, 1, 3], device=subject.device)
    some = {name: column[picked] for name, column in columns.items()}
    apart = subject.processor.apply(logits[picked].clone(), at[picked], some)
    assert torch.equal(apart, together[picked]), "a row's scores depend on the rows beside it"
