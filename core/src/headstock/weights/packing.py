"""Parameters that stay as a checkpoint packs them, of one tensor or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import ParamSpec, Weight, WeightFormat, WeightKind
from headstock.weights.pieces import Piece
from headstock.weights.quantization import PackedTensor
from headstock.weights.reader import CheckpointReader

_WHOLE_BYTES = (WeightKind.FP8_E4M3, WeightKind.INT8)


def find_format(
    spec: ParamSpec, pieces: Sequence[Piece], checkpoint: CheckpointReader
) -> WeightFormat | None:
    """Find the format in which a matrix can stay; None where it must be made plain.

    That is so for what a transform changes, but for rows that it moves, for parts in different
    formats or in another order of columns, and for slices that cut through the groups of a scale.
    """
    rows = {piece.row for piece in pieces}
    # A stack of matrices is stored as its rows, or as one tensor.
    is_whole = rows == {None} or (spec.stacked and rows == set(range(spec.shape[0])))
    is_map = {len(piece.shape) for piece in pieces} in ({2}, {3})
    is_moved = spec.packed_rows is not None and rows == {None}
    if not (is_whole and is_map) or (spec.transform is not None and not is_moved):
        return None
    packed = [checkpoint.packed.get(piece.name) for piece in pieces]
    is_alone = len(pieces) == 1 and not spec.stacked
    formats = set()
    for piece, each in zip(pieces, packed, strict=True):
        is_swapped = piece.is_swapped or is_moved
        if each is None or each.is_swapped != is_swapped or each.may_reorder:
            return None
        formats.add(_find_local_format(_turn(piece, each), each, is_alone=is_alone))
    found = formats.pop()
    return found if found is not None and not formats else None


def _turn(piece: Piece, packed: PackedTensor) -> Piece:
    """The part of a tensor as it is packed."""
    return piece.swap() if packed.is_swapped else piece


def _find_local_format(
    piece: Piece, packed: PackedTensor, *, is_alone: bool
) -> WeightFormat | None:
    """The format of a part of a tensor; None where it cuts groups, or a byte."""
    group, columns = packed.format.group, piece.size[-1]
    if packed.format.kind not in _WHOLE_BYTES and (piece.begin[-1] % 2 or columns % 2):
        return None
    if group is None:
        if len(piece.shape) > 2:
            return None
        # One scale for each of several parts is one for each of their rows.
        return packed.format if is_alone else evolve(packed.format, group=(1, columns))
    sizes = []
    places = (piece.begin[-2:], piece.size[-2:], piece.shape[-2:])
    for size, begin, count, whole in zip(group, *places, strict=True):
        if size >= whole and size != 1:
            sizes.append(count)
            continue
        if begin % size or (count % size and begin + count != whole):
            return None
        sizes.append(size)
    if not is_alone and piece.size[-2] % sizes[0]:
        return None  # the next part begins amid a group
    return evolve(packed.format, group=(sizes[0], sizes[1]))


def pack_pieces(
    spec: ParamSpec,
    pieces: Sequence[Piece],
    format: WeightFormat,
    checkpoint: CheckpointReader,
    device: torch.device,
) -> Weight:
    """Join the parts of a parameter as they are stored, with its rows in their order.

    raises: ModelError for damaged numbers
    """
    if pieces[0].row is None:
        weight = _join_rows(pieces, format, checkpoint, device)
        return weight if spec.packed_rows is None else _move_rows(weight, spec.packed_rows)
    stacks: dict[int | None, list[Piece]] = {}
    for piece in pieces:
        stacks.setdefault(piece.row, []).append(piece)
    layers = [_join_rows(each, format, checkpoint, device) for _, each in sorted(stacks.items())]
    scales = [each.scales for each in layers if each.scales is not None]
    zeros = [each.zeros for each in layers if each.zeros is not None]
    return Weight(
        tensor=torch.stack([each.tensor for each in layers]),
        scales=torch.stack(scales),
        zeros=torch.stack(zeros) if zeros else None,
        format=format,
    )


def _move_rows(weight: Weight, move: Callable[[Tensor], Tensor]) -> Weight:
    """The weight with its rows moved, and with them what belongs to each."""
    assert weight.scales is not None
    return evolve(
        weight,
        tensor=move(weight.tensor),
        scales=move(weight.scales),
        zeros=None if weight.zeros is None else move(weight.zeros),
    )


def _join_rows(
    pieces: Sequence[Piece],
    format: WeightFormat,
    checkpoint: CheckpointReader,
    device: torch.device,
) -> Weight:
    """Join the parts of a matrix, or of a stack of matrices."""
    parts = []
    for piece in pieces:
        part = _turn(piece, checkpoint.packed[piece.name])
        parts.append(_cut(checkpoint.read_weight(piece.name), part, format))
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Weight(
        tensor=_join([part.tensor for part in parts], device),
        scales=scales[0].to(device) if format.group is None else _join(scales, device),
        zeros=_join(zeros, device) if zeros else None,
        format=format,
    )


def _cut(weight: Weight, piece: Piece, format: WeightFormat) -> Weight:
    """A part of a packed matrix, or of a stack, in the format that it has there."""
    assert weight.format is not None
    assert weight.scales is not None
    (row, column), (rows, columns) = piece.begin[-2:], piece.size[-2:]
    numbers = 1 if weight.format.kind in _WHOLE_BYTES else 2
    stack = tuple(
        slice(at, at + size) for at, size in zip(piece.begin[:-2], piece.size[:-2], strict=True)
    )
    place = (
        *stack,
        slice(row, row + rows),
        slice(column // numbers, -(-(column + columns) // numbers)),
    )
    tensor, scales, zeros = weight.tensor[place], weight.scales, weight.zeros
    if weight.format.group is None:
        if format.group is not None:
            scales = scales.reshape(1, 1).expand(rows, 1)
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(rows, 1)
        return evolve(weight, tensor=tensor, scales=scales, zeros=zeros, format=format)
    begins, counts = [], []
    for size, begin, count, whole in zip(
        weight.format.group, piece.begin[-2:], piece.size[-2:], piece.shape[-2:], strict=True
    ):
        begins.append(0 if size >= whole and size != 1 else begin // size)
        counts.append(1 if size >= whole and size != 1 else -(-count // size))
    place = (
        *stack,
        *(slice(at, at + count) for at, count in zip(begins, counts, strict=True)),
    )
    zeros = None if zeros is None else zeros[place]
    return evolve(weight, tensor=tensor, scales=scales[place], zeros=zeros, format=format)


def _join(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Rows below each other, in memory of their own on the device."""
    return torch.cat([part.to(device) for part in parts], -2).contiguous()
