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
from headstock.spi import ParamSpec, Weight
from headstock.weights.dequantize import dequantize_
from headstock.weights.directory import read_json, weight_files
from headstock.weights.quant_reader import PackedTensor, QuantReader, find_quant_reader
from headstock.weights.safetensors_header import TensorEntry, read_header

_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
_MAX_NAMES_SHOWN = 5
"""How many tensor names an error lists before it only counts the rest."""


@frozen(eq=False)
class CheckpointReader:
    """The open files of a model directory, used in a `with` statement.

    tensors: by name, those that a model may use; packed ones stand for what they pack
    packed: the formats of those that are not plain
    entries: all, with scales
    """

    directory: Path
    tensors: Mapping[str, TensorEntry]
    packed: Mapping[str, PackedTensor]
    entries: Mapping[str, TensorEntry]
    _paths: Mapping[str, Path]
    _stack: ExitStack = field(factory=ExitStack)
    _files: dict[Path, Any] = field(factory=dict)

    @classmethod
    def open(cls, directory: Path, reader: QuantReader | None) -> CheckpointReader:
        """Open the checkpoint, whose weights `reader` unpacks where it is given.

        raises: ModelError when a file does not match its header, or the weights are not quantized
            as config.json says
        """
        entries: dict[str, TensorEntry] = {}
        paths: dict[str, Path] = {}
        for path in weight_files(directory):
            for name, entry in read_header(path).items():
                if name in entries:
                    raise ModelError(
                        f"{shorten(name)} is in both {paths[name].name} and {path.name} of "
                        f"{directory}"
                    )
                entries[name], paths[name] = entry, path
        if reader is None:
            return cls(directory, entries, {}, entries, paths)
        try:
            found = reader.sort(entries)
        except ModelError as error:
            raise ModelError(f"the weights in {directory}: {error}") from error
        aside = found.unread | {each.scales for each in found.packed.values()}
        tensors = {name: entry for name, entry in entries.items() if name not in aside}
        return cls(directory, tensors, found.packed, entries, paths)

    def read(self, name: str) -> Tensor:
        """Read the tensor of that name, on the CPU as it is stored."""
        path = self._paths[name]
        # A file is mapped at its first tensor and stays open: a second mapping would parse the
        # header again.
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path].get_tensor(name)  # type: ignore[no-any-return]

    def read_weight(self, name: str) -> Weight:
        """Read a tensor with the scales that it needs.   raises: ModelError for damaged scales"""
        packed = self.packed.get(name)
        if packed is None:
            return Weight(tensor=self.read(name))
        scales = self.read(packed.scales).float()
        # No quantizer writes a scale of 0: it would lose what it scales.
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ModelError(
                f"{packed.scales} in {self.directory} holds scales that are NaN, infinite or not "
                "above 0; the file is damaged: copy or download it again"
            )
        return Weight(tensor=self.read(name), scales=scales, format=packed.format)

    def copy_into(self, out: Tensor, name: str) -> None:
        """Write what a tensor stands for, converted and on the device of `out`.

        writes: out
        raises: ModelError for damaged scales
        """
        weight = self.read_weight(name)
        if weight.format is None:
            out.copy_(weight.tensor)
        else:
            dequantize_(weight, out)

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers, whatever their dtypes."""
        if self.entries[name].shape != self.entries[other].shape:
            return False
        one, two = self._read_plain(name), self._read_plain(other)
        dtype = torch.promote_types(one.dtype, two.dtype)
        return torch.equal(one.to(dtype), two.to(dtype))

    def _read_plain(self, name: str) -> Tensor:
        """What a tensor stands for, as it is stored where it is plain."""
        if name not in self.packed:
            return self.read(name)
        out = torch.empty(self.entries[name].shape)
        self.copy_into(out, name)
        return out

    def nbytes(self, name: str) -> int:
        """How many bytes of file the tensor takes, with its scales."""
        packed = self.packed.get(name)
        return self.entries[name].nbytes + (self.entries[packed.scales].nbytes if packed else 0)

    def list_files(self) -> set[Path]:
        """List the files."""
        return set(self._paths.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()


def read_quantization(directory: Path) -> QuantReader | None:
    """Find the reader of a model directory; None where its weights are not quantized.

    raises: ModelError when they are in a way that is not served
    """
    try:
        return find_quant_reader(read_json(directory, "config.json"))
    except ValueError as error:
        raise ModelError(f"config.json in {directory}: {error}") from error


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
    if spec.whole is not None and spec.whole in checkpoint.tensors:
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
    missing = [name for name in declared if name not in checkpoint.tensors]
    unexpected = [
        name for name in checkpoint.tensors if name not in declared and name not in ignored
    ]
    if missing or unexpected:
        problems = [
            f"{_join_names(names)} {problem}"
            for names, problem in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        raise ModelError(where + "; ".join(problems))
    for name, piece in declared.items():
        entry = checkpoint.tensors[name]
        if entry.shape != piece.shape:
            raise ModelError(
                f"{where}{name} has shape {list(entry.shape)}, wanted {list(piece.shape)}"
            )
        # Integers and 8-bit floats are quantized weights: without a format nothing says what their
        # scales are.
        if entry.dtype not in _FLOAT_DTYPES and name not in checkpoint.packed:
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
            if {name, source} <= checkpoint.tensors.keys() and not checkpoint.is_equal(
                name, source
            ):
                yield name


def _join_names(names: list[str]) -> str:
    """Join the first few names, and count the rest."""
    rest = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(map(shorten, names[:_MAX_NAMES_SHOWN])) + rest
