"""Read the tensors of a model directory, checked against the declaration before any is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from attrs import field, frozen
from safetensors import safe_open
from torch import Tensor

from headstock.errors import ModelError, shorten
from headstock.spi import ParamSpec
from headstock.weights.directory import weight_files
from headstock.weights.safetensors_header import TensorEntry, read_header

_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
_MAX_NAMES_SHOWN = 5
"""How many tensor names an error lists before it only counts the rest."""


@frozen(eq=False)
class CheckpointReader:
    """The open files of a model directory, used in a `with` statement."""

    directory: Path
    entries: Mapping[str, tuple[Path, TensorEntry]]
    _stack: ExitStack = field(factory=ExitStack)
    _files: dict[Path, Any] = field(factory=dict)

    @classmethod
    def open(cls, directory: Path) -> CheckpointReader:
        """Open the checkpoint.   raises: ModelError when a file does not match its header"""
        entries: dict[str, tuple[Path, TensorEntry]] = {}
        for path in weight_files(directory):
            for name, entry in read_header(path).items():
                if name in entries:
                    raise ModelError(
                        f"{shorten(name)} is in both {entries[name][0].name} and {path.name} of "
                        f"{directory}"
                    )
                entries[name] = path, entry
        return cls(directory, entries)

    def read(self, name: str) -> Tensor:
        """Read the tensor of that name, on the CPU as it is stored."""
        path, _ = self.entries[name]
        # A file is mapped at its first tensor and stays open: a second mapping would parse the
        # header again.
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path].get_tensor(name)  # type: ignore[no-any-return]

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers, whatever their dtypes."""
        if self.entries[name][1].shape != self.entries[other][1].shape:
            return False
        one, two = self.read(name), self.read(other)
        dtype = torch.promote_types(one.dtype, two.dtype)
        return torch.equal(one.to(dtype), two.to(dtype))

    def nbytes(self, name: str) -> int:
        """How many bytes of file the tensor takes."""
        return self.entries[name][1].nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()


@frozen
class Piece:
    """A checkpoint tensor and its place in a parameter.

    `row` is its row in a stack, or None; `start` is its first index in the next dimension.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None
    start: int


def _list_pieces(spec: ParamSpec, checkpoint: CheckpointReader) -> Iterator[Piece]:
    """List the checkpoint tensors that make up a parameter."""
    full = spec.source_shape or spec.shape
    if spec.whole is not None and spec.whole in checkpoint.entries:
        yield Piece(spec.whole, full, None, 0)
        return
    shape = full[1:] if spec.stacked else full
    for row, names in enumerate(spec.sources):
        start = 0
        for name, part in zip(
            names, spec.parts or [shape[0] // len(names)] * len(names), strict=True
        ):
            yield Piece(name, (part, *shape[1:]), row if spec.stacked else None, start)
            start += part


def plan_pieces(
    specs: Mapping[str, ParamSpec], checkpoint: CheckpointReader
) -> dict[str, list[Piece]]:
    """Plan each parameter's pieces, and check that the checkpoint has exactly those.

    raises: ModelError naming tensors that are missing, unexpected, or of another shape or kind of
        dtype
    """
    pieces_by_parameter = {
        name: list(_list_pieces(spec, checkpoint)) for name, spec in specs.items() if spec.sources
    }
    declared = {piece.name: piece for parts in pieces_by_parameter.values() for piece in parts}
    ignored = {name for spec in specs.values() for name in (*spec.ignored, *spec.copies)}
    where = f"the weights in {checkpoint.directory} do not fit the model: "
    missing = [name for name in declared if name not in checkpoint.entries]
    unexpected = [
        name for name in checkpoint.entries if name not in declared and name not in ignored
    ]
    if missing or unexpected:
        problems = [
            f"{_join_names(names)} {problem}"
            for names, problem in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        raise ModelError(where + "; ".join(problems))
    for name, piece in declared.items():
        entry = checkpoint.entries[name][1]
        if entry.shape != piece.shape:
            raise ModelError(
                f"{where}{name} has shape {list(entry.shape)}, wanted {list(piece.shape)}"
            )
        # Integers and 8-bit floats are quantized weights, whose scales nothing here would apply.
        if entry.dtype not in _FLOAT_DTYPES:
            raise ModelError(
                f"{where}{name} has dtype {entry.dtype}, wanted one of {', '.join(_FLOAT_DTYPES)}"
            )
    return pieces_by_parameter


def list_differing_copies(
    specs: Mapping[str, ParamSpec], checkpoint: CheckpointReader
) -> Iterator[str]:
    """List the stored tensors that are declared as copies of another one and differ from it."""
    for spec in specs.values():
        for name in spec.copies:
            source = spec.sources[0][0]
            if {name, source} <= checkpoint.entries.keys() and not checkpoint.is_equal(
                name, source
            ):
                yield name


def _join_names(names: list[str]) -> str:
    """Join the first few names, and count the rest."""
    rest = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(map(shorten, names[:_MAX_NAMES_SHOWN])) + rest
