"""Parameters that stay as a checkpoint packs them, of one tensor or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence

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

    That is so for what a transform changes, for parts in different formats or in another order of
    columns, and for slices that cut through the groups of a scale.
    """
    rows = {piece.row for piece in pieces}
    is_whole = rows == set(range(spec.shape[0])) if spec.stacked else rows == {None}
    is_matrix = all(len(piece.shape) == 2 for piece in pieces)
    if spec.transform is not None or not is_whole or not is_matrix:
        return None
    packed = [checkpoint.packed.get(piece.name) for piece in pieces]
    is_alone = len(pieces) == 1 and not spec.stacked
    formats = set()
    for piece, each in zip(pieces, packed, strict=True):
        if each is None or each.is_swapped or each.may_reorder or piece.is_swapped:
            return None
        formats.add(_find_local_format(piece, each, is_alone=is_alone))
    found = formats.pop()
    return found if found is not None and not formats else None


def _find_local_format(
    piece: Piece, packed: PackedTensor, *, is_alone: bool
) -> WeightFormat | None:
    """The format of a part of a tensor; None where it cuts groups, or a byte."""
    group = packed.format.group
    if packed.format.kind not in _WHOLE_BYTES and (piece.begin[1] % 2 or piece.size[1] % 2):
        return None
    if group is None:
        # One scale for each of several parts is one for each of their rows.
        return packed.format if is_alone else evolve(packed.format, group=(1, piece.size[1]))
    sizes = []
    for size, begin, count, whole in zip(group, piece.begin, piece.size, piece.shape, strict=True):
        if size >= whole and size != 1:
            sizes.append(count)
            continue
        if begin % size or (count % size and begin + count != whole):
            return None
        sizes.append(size)
    if not is_alone and piece.size[0] % sizes[0]:
        return None  # the next part begins amid a group
    return evolve(packed.format, group=(sizes[0], sizes[1]))


def pack_pieces(
    pieces: Sequence[Piece],
    format: WeightFormat,
    checkpoint: CheckpointReader,
    device: torch.device,
) -> Weight:
    """Join the parts of a parameter as they are stored.   raises: ModelError for damaged numbers"""
    if pieces[0].row is None:
        return _join_rows(pieces, format, checkpoint, device)
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


def _join_rows(
    pieces: Sequence[Piece],
    format: WeightFormat,
    checkpoint: CheckpointReader,
    device: torch.device,
) -> Weight:
    """Join the parts of a matrix."""
    parts = [_cut(checkpoint.read_weight(piece.name), piece, format) for piece in pieces]
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Weight(
        tensor=_join([part.tensor for part in parts], device),
        scales=scales[0].to(device) if format.group is None else _join(scales, device),
        zeros=_join(zeros, device) if zeros else None,
        format=format,
    )


def _cut(weight: Weight, piece: Piece, format: WeightFormat) -> Weight:
    """A part of a packed matrix, in the format that it has there."""
    assert weight.format is not None
    assert weight.scales is not None
    (row, column), (rows, columns) = piece.begin, piece.size
    numbers = 1 if weight.format.kind in _WHOLE_BYTES else 2
    tensor = weight.tensor[row : row + rows, column // numbers : -(-(column + columns) // numbers)]
    scales, zeros = weight.scales, weight.zeros
    if weight.format.group is None:
        if format.group is not None:
            scales = scales.reshape(1, 1).expand(rows, 1)
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(rows, 1)
        return evolve(weight, tensor=tensor, scales=scales, zeros=zeros, format=format)
    begins, counts = [], []
    for size, begin, count, whole in zip(
        weight.format.group, piece.begin, piece.size, piece.shape, strict=True
    ):
        begins.append(0 if size >= whole and size != 1 else begin // size)
        counts.append(1 if size >= whole and size != 1 else -(-count // size))
    place = tuple(slice(at, at + count) for at, count in zip(begins, counts, strict=True))
    zeros = None if zeros is None else zeros[place]
    return evolve(weight, tensor=tensor, scales=scales[place], zeros=zeros, format=format)


def _join(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Rows below each other, in memory of their own on the device."""
    return torch.cat([part.to(device) for part in parts]).contiguous()
