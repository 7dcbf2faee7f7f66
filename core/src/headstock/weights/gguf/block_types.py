"""The types of GGUF tensors: how many bytes a block of numbers takes, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor

_Unpack = Callable[[Tensor], Tensor]


@frozen
class BlockType:
    """How numbers of a row are stored, block by block.

    name: that of the format
    numbers: how many a block holds
    nbytes: how many bytes it takes
    unpack: makes [blocks, numbers] of uint8 [blocks, nbytes]: plain numbers in their own type, and
        float32 of others
    stored: the name of what it stands for without a loss, in the words of safetensors
    """

    name: str
    numbers: int
    nbytes: int
    unpack: _Unpack
    stored: str = "F32"

    @property
    def is_packed(self) -> bool:
        """Whether several numbers share a scale."""
        return self.numbers > 1


def _view_plain(dtype: torch.dtype) -> _Unpack:
    """What takes plain numbers as they are."""

    def unpack(blocks: Tensor) -> Tensor:
        return blocks.view(dtype)

    return unpack


def _read_half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block.   returns: [blocks, 1] float32"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _split_nibbles(values: Tensor) -> Tensor:
    """The low halves of bytes, then the high ones.   returns: [..., 2, bytes] uint8"""
    return torch.stack((values & 15, values >> 4), -2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    """A scale and 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).to(torch.float32) * _read_half(blocks, 0)


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    """A scale, and 32 halves of bytes around 8."""
    numbers = _split_nibbles(blocks[:, 2:]).flatten(1).to(torch.float32)
    return numbers.sub_(8).mul_(_read_half(blocks, 0))


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    """A scale, the least number, and 32 halves of bytes."""
    numbers = _split_nibbles(blocks[:, 4:]).flatten(1).to(torch.float32)
    return numbers.mul_(_read_half(blocks, 0)).add_(_read_half(blocks, 2))


def _read_fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """The fifth bits of 32 numbers, in four bytes.   returns: [blocks, 32] uint8, 0 or 16"""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> places & 1) << 4).flatten(1)


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    """A scale, and 32 numbers of 5 bits around 16."""
    numbers = _split_nibbles(blocks[:, 6:]).flatten(1) | _read_fifth_bits(blocks, 2)
    return numbers.to(torch.float32).sub_(16).mul_(_read_half(blocks, 0))


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    """A scale, the least number, and 32 numbers of 5 bits."""
    numbers = _split_nibbles(blocks[:, 8:]).flatten(1) | _read_fifth_bits(blocks, 4)
    scaled = numbers.to(torch.float32).mul_(_read_half(blocks, 0))
    return scaled.add_(_read_half(blocks, 2))


def _read_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What each 32 of 256 numbers are multiplied by, and what is subtracted then.

    Both are 6 bits times a number of the block. Of the first four, 6 bits are in a byte, whose
    upper 2 bits belong to the last four.

    returns: twice [blocks, 8, 1] float32
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), 1)
    least = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), 1)
    return (
        (_read_half(blocks, 0) * scales.to(torch.float32))[:, :, None],
        (_read_half(blocks, 2) * least.to(torch.float32))[:, :, None],
    )


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    """256 halves of bytes, with a scale and a least number for each 32."""
    scales, least = _read_k_scales(blocks)
    numbers = _split_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)
    return numbers.to(torch.float32).mul_(scales).sub_(least).flatten(1)


def _unpack_q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K with a fifth bit: each byte of these has one for every 32 numbers."""
    scales, least = _read_k_scales(blocks)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> places & 1) << 4
    numbers = _split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2) | fifth
    return numbers.to(torch.float32).mul_(scales).sub_(least).flatten(1)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    """256 numbers of 4 and 2 bits around 32, with a scale for each 16."""
    low = _split_nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [blocks, half, nibble, 64]
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3  # [blocks, half, 4, 32]
    numbers = low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32) * _read_half(blocks, 208)
    return numbers.to(torch.float32).sub_(32).mul_(scales[:, :, None]).flatten(1)


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, _view_plain(torch.float32)),
    1: BlockType("F16", 1, 2, _view_plain(torch.float16), "F16"),
    2: BlockType("Q4_0", 32, 18, _unpack_q4_0),
    3: BlockType("Q4_1", 32, 20, _unpack_q4_1),
    6: BlockType("Q5_0", 32, 22, _unpack_q5_0),
    7: BlockType("Q5_1", 32, 24, _unpack_q5_1),
    8: BlockType("Q8_0", 32, 34, _unpack_q8_0),
    12: BlockType("Q4_K", 256, 144, _unpack_q4_k),
    13: BlockType("Q5_K", 256, 176, _unpack_q5_k),
    14: BlockType("Q6_K", 256, 210, _unpack_q6_k),
    30: BlockType("BF16", 1, 2, _view_plain(torch.bfloat16), "BF16"),
}
"""The types that are read, by the number that files have for them."""

BLOCK_TYPES_BY_NAME: Mapping[str, BlockType] = {each.name: each for each in BLOCK_TYPES.values()}

UNREAD_NAMES: Mapping[int, str] = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""The names of other types."""
