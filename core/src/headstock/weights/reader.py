"""Read the tensors of a model directory, checked against the declaration before any is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Self

import torch
from attrs import field, frozen
from torch import Tensor

from headstock.errors import ModelError, PluginBroken, shorten
from headstock.logs import LogEvent
from headstock.spi import ParamSpec, Role, Shard, Weight
from headstock.weights.pieces import Piece, swap_sizes
from headstock.weights.quantization import PackedTensor, QuantReader, dequantize_
from headstock.weights.safetensors_header import TensorEntry
from headstock.weights.stored_tensors import find_parts_left_out, find_stored_names, read_stored
from headstock.weights.tensor_files import TensorFile, narrow

_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
WHOLE = Shard()
_PADDED = frozenset((Role.EMBEDDING, Role.HEAD))
"""Roles of parameters with a row for each token id, of which the last parts may lack some."""
_MAX_NAMES_SHOWN = 2
"""How many tensor names an error lists before it only counts the rest."""


@frozen(eq=False)
class CheckpointReader:
    """The open files of a model directory, used in a `with` statement.

    directory: where they are, or the one file
    tensors: by name, those that a model may use; packed ones stand for what they pack
    packed: the formats of those that are not plain
    entries: all, with scales
    stored: the name that each has in its file
    lost: names in the index that no file holds, with the file that it names for them
    remarks: what is odd about the directory, for the log
    """

    directory: Path
    tensors: Mapping[str, TensorEntry]
    packed: Mapping[str, PackedTensor]
    entries: Mapping[str, TensorEntry]
    stored: Mapping[str, str]
    lost: Mapping[str, str]
    remarks: tuple[LogEvent, ...]
    _paths: Mapping[str, Path]
    _open_file: Callable[[Path], TensorFile]
    _files: dict[Path, TensorFile] = field(factory=dict)

    @classmethod
    def open(
        cls,
        directory: Path,
        reader: QuantReader | None,
        specs: Mapping[str, ParamSpec] | None = None,
    ) -> CheckpointReader:
        """Open the checkpoint, whose weights `reader` unpacks where it is given.

        Tensors have the names that `specs` have for them, or without those their own.

        raises: ModelError when a file does not match its header, the weights are not quantized as
            config.json says, or they are named in two ways
        """
        found = read_stored(directory)
        names = find_stored_names(found.entries, specs or {}, directory)
        entries = {name: found.entries[stored] for name, stored in names.items()}
        paths = {name: found.paths[stored] for name, stored in names.items()}
        packed, aside = _sort_entries(directory, reader, entries)
        return cls(
            directory=found.place,
            tensors={name: entry for name, entry in entries.items() if name not in aside}
            | {name: each.entry for name, each in packed.items()},
            packed=packed,
            entries=entries,
            stored=names | {name: names[each.sources[0]] for name, each in packed.items()},
            lost=found.lost,
            remarks=found.remarks,
            paths=paths,
            open_file=found.open_file,
        )

    def read(self, name: str) -> Tensor:
        """Read the tensor of that name, on the CPU in the type that holds it without a loss."""
        return self._open(name).read(self.stored[name])

    def _open(self, name: str) -> TensorFile:
        """The file that has the tensor."""
        path = self._paths[name]
        # A file is mapped at its first tensor and stays open: a second mapping would parse the
        # header again.
        if path not in self._files:
            self._files[path] = self._open_file(path)
        return self._files[path]

    def read_weight(self, name: str) -> Weight:
        """Read a tensor with what belongs to it.   raises: ModelError for damaged numbers"""
        packed = self.packed.get(name)
        if packed is None:
            return Weight(tensor=self.read(name))
        try:
            return packed.unpack([self.read(source) for source in packed.sources])
        except ValueError as error:
            raise ModelError(
                f"the weights in {self.directory}: {error}; the file is damaged: copy or download "
                "it again"
            ) from error

    def copy_into(self, out: Tensor, name: str, begin: tuple[int, ...] | None = None) -> None:
        """Write what a tensor stands for, or a part of it, converted and on the device of `out`.

        begin: where the part begins; None for the whole tensor
        writes: out
        raises: ModelError for damaged numbers
        """
        begin = begin or (0,) * out.dim()
        if name not in self.packed:
            self._open(name).copy_into(out, self.stored[name], begin)
            return
        weight = self.read_weight(name)
        if self.packed[name].is_swapped:
            out, begin = out.mT, swap_sizes(begin)
        # Matrices of a stack are cut here, and what is inside a block where it is unpacked.
        if stack := begin[:-2]:
            weight = _narrow_stack(weight, stack, tuple(out.shape[:-2]))
        dequantize_(weight, out, (begin[-2], begin[-1]))

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers, whatever their dtypes."""
        if self.tensors[name].shape != self.tensors[other].shape:
            return False
        one, two = self._read_plain(name), self._read_plain(other)
        dtype = torch.promote_types(one.dtype, two.dtype)
        return torch.equal(one.to(dtype), two.to(dtype))

    def _read_plain(self, name: str) -> Tensor:
        """What a tensor stands for, as it is stored where it is plain."""
        if name not in self.packed:
            return self.read(name)
        out = torch.empty(self.tensors[name].shape)
        self.copy_into(out, name)
        return out

    def nbytes(self, name: str) -> int:
        """How many bytes of file the tensor takes, with its scales."""
        packed = self.packed.get(name)
        names = (name,) if packed is None else packed.sources
        return sum(self.entries[each].nbytes for each in names)

    def list_files(self) -> set[Path]:
        """List the files."""
        return set(self._paths.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()


def _sort_entries(
    directory: Path, reader: QuantReader | None, entries: Mapping[str, TensorEntry]
) -> tuple[Mapping[str, PackedTensor], Set[str]]:
    """The packed tensors, and the names of those that only serve others.   raises: ModelError"""
    if reader is None:
        return {}, frozenset()
    try:
        found = reader.sort(entries)
    except ModelError as error:
        raise ModelError(f"the weights in {directory}: {error}") from error
    sources = {source for each in found.packed.values() for source in each.sources}
    return found.packed, found.unread | sources


def _narrow_stack(weight: Weight, begin: tuple[int, ...], size: tuple[int, ...]) -> Weight:
    """Some matrices of a packed stack."""
    scales, zeros = weight.scales, weight.zeros
    assert weight.format is not None
    if weight.format.group is not None:  # else one scale is for all
        scales, zeros = (
            each if each is None else narrow(each, begin, size) for each in (scales, zeros)
        )
    tensor = narrow(weight.tensor, begin, size)
    return Weight(tensor=tensor, scales=scales, zeros=zeros, format=weight.format)


def _list_names(spec: ParamSpec, checkpoint: CheckpointReader) -> Iterator[str]:
    """List the checkpoint tensors that make up a parameter."""
    if spec.whole is not None and spec.whole in checkpoint.tensors:
        yield spec.whole
        return
    for names in spec.sources:
        yield from names


def _list_pieces(
    spec: ParamSpec, whole: ParamSpec, shard: Shard, checkpoint: CheckpointReader
) -> Iterator[Piece]:
    """List the parts of checkpoint tensors that make up a parameter.

    whole: the same parameter of the whole model
    """
    full, local = whole.source_shape or whole.shape, spec.source_shape or spec.shape
    cut = partial(_cut, shard=shard, is_padded=bool(spec.roles & _PADDED))
    if spec.whole is not None and spec.whole in checkpoint.tensors:
        pieces = cut(spec.whole, None, full, local, whole.parts, spec.parts, spec.stacked)
        stored = checkpoint.tensors[spec.whole].shape
        is_swapped = spec.may_swap_whole and stored == swap_sizes(full) != full
        yield from (piece.swap() if is_swapped else piece for piece in pieces)
        return
    if spec.stacked:
        full, local = full[1:], local[1:]
    for row, names in enumerate(spec.sources):
        place = row if spec.stacked else None
        if not full:
            yield _take_scalar(names, place)
            continue
        if len(names) == 1:
            yield from cut(names[0], place, full, local, whole.parts, spec.parts, 0)
            continue
        start = 0
        full_parts, local_parts = (
            each or (shape[0] // len(names),) * len(names)
            for each, shape in ((whole.parts, full), (spec.parts, local))
        )
        for name, full_rows, rows in zip(names, full_parts, local_parts, strict=True):
            shapes = (full_rows, *full[1:]), (rows, *local[1:])
            yield from cut(name, place, *shapes, (), (), 0, start)
            start += rows


def _take_scalar(names: tuple[str, ...], row: int | None) -> Piece:
    """The one number of a parameter without dimensions.   raises: PluginBroken"""
    if len(names) != 1:
        raise PluginBroken(
            "a family's parameter without dimensions: expected one tensor, got "
            f"{_join_names(list(names))}; only a parameter with dimensions joins several"
        )
    return Piece(names[0], (), (), (), row, ())


def _cut(
    name: str,
    row: int | None,
    full: tuple[int, ...],
    local: tuple[int, ...],
    full_parts: tuple[int, ...],
    local_parts: tuple[int, ...],
    axis: int,
    start: int = 0,
    *,
    shard: Shard,
    is_padded: bool,
) -> Iterator[Piece]:
    """Cut a tensor whose parts lie one after the other on `axis`; `start` is there in the row."""
    if full == local or not full_parts:
        full_parts, local_parts = (full[axis],), (local[axis],)
    begin = 0
    for full_size, size in zip(full_parts, local_parts, strict=True):
        sizes = (*local[:axis], size, *local[axis + 1 :])
        full_sizes = (*full[:axis], full_size, *full[axis + 1 :])
        begins = [
            _find_slice(*each, shard, is_padded=is_padded)
            for each in zip(full_sizes, sizes, strict=True)
        ]
        # What a padded slice holds beyond the end stays zero.
        sizes = tuple(
            max(min(size, full_size - at), 0)
            for at, size, full_size in zip(begins, sizes, full_sizes, strict=True)
        )
        begins[axis] += begin
        out_begin = [0] * len(sizes)
        out_begin[axis] = start
        yield Piece(name, full, tuple(begins), sizes, row, tuple(out_begin))
        begin, start = begin + full_size, start + size


def _find_slice(full: int, local: int, shard: Shard, *, is_padded: bool) -> int:
    """Where the shard's slice of a dimension begins; 0 where every shard has all of it.

    raises: PluginBroken when the shards have no equal slices
    """
    if full == local:
        return 0
    if is_padded or (full % shard.count and local == -(-full // shard.count)):
        return min(shard.index * local, full)  # padded at the end
    slices = full // max(1, local)
    if full % max(1, local) or shard.count % slices:
        raise PluginBroken(
            f"a family's shard has {local} of {full}, but {shard.count} shards cannot have equal "
            "slices"
        )
    # Fewer slices than shards: several shards hold the same heads of keys and values.
    return shard.index * slices // shard.count * local


def plan_pieces(
    specs: Mapping[str, ParamSpec],
    checkpoint: CheckpointReader,
    whole: Mapping[str, ParamSpec] | None = None,
    shard: Shard = WHOLE,
) -> dict[str, list[Piece]]:
    """Plan each parameter's pieces, and check that the checkpoint has exactly those.

    whole: the parameters of the whole model, where `specs` are those of a shard

    raises: ModelError naming tensors that are missing, unexpected, or of another shape or kind of
        dtype
    """
    pieces_by_parameter = {
        name: list(_list_pieces(spec, (whole or specs)[name], shard, checkpoint))
        for name, spec in specs.items()
        if spec.sources
    }
    declared = {piece.name: piece for parts in pieces_by_parameter.values() for piece in parts}
    # Experts that other ranks read are in the checkpoint too.
    wanted = dict.fromkeys(
        name for spec in (whole or specs).values() for name in _list_names(spec, checkpoint)
    )
    ignored = {name for spec in specs.values() for name in (*spec.ignored, *spec.copies)}
    where = f"the weights in {checkpoint.directory} do not fit the model: "
    missing = [name for name in wanted if name not in checkpoint.tensors]
    left_out = find_parts_left_out(checkpoint.tensors, specs.values())
    unexpected = [
        checkpoint.stored[name]
        for name in checkpoint.tensors
        if name not in wanted and name not in ignored and name not in left_out
    ]
    if missing or unexpected:
        # The word comes first: what shows an error in less room cuts its end off.
        problems = [
            f"{problem} {_join_names(names)}"
            for names, problem in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        problems += [
            f"the index has {shorten(name)} in {shorten(checkpoint.lost[name])}, which lacks it"
            for name in missing
            if name in checkpoint.lost
        ][:1]
        raise ModelError(where + "; ".join(problems))
    for name, piece in declared.items():
        entry = checkpoint.tensors[name]
        if entry.shape != piece.shape:
            raise ModelError(
                f"{where}{name}: expected shape {list(piece.shape)}, got {list(entry.shape)}"
            )
        # Integers and 8-bit floats are quantized weights: without a format nothing says what their
        # scales are.
        if entry.dtype not in _FLOAT_DTYPES and name not in checkpoint.packed:
            raise ModelError(
                f"{where}{name}: expected one of {', '.join(_FLOAT_DTYPES)}, got {entry.dtype}"
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
