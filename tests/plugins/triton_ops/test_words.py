"""The assembler code that unpacks words, which Triton's interpreter cannot run."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from headstock.spi import WeightKind
from headstock_triton.word_numbers import WORD_KINDS, count_slices, pack_words, write_code

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SLICE = 32


def as_pair(word: int) -> Tensor:
    """The two numbers of bfloat16 in a word."""
    halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
    return halves.to(torch.int16).view(torch.bfloat16)


def as_word(pair: Tensor) -> int:
    low, high = (int(half) & 0xFFFF for half in pair.view(torch.int16))
    return low | high << 16


def run(code: str, slices: int, given: list[int]) -> list[Tensor]:
    """What the assembler code makes of words: two numbers for each slice."""
    registers = {f"${slices + place}": word & 0xFFFFFFFF for place, word in enumerate(given)}
    for line in re.findall(r"(?:shr|shl|and|lop3|sub|mul)[^;]*", code):
        name, target, *names = line.replace(",", "").split()
        values = [registers[each] if each in registers else int(each, 0) for each in names]
        if name in ("shr.b32", "shl.b32"):
            word, places = values
            made = word >> places if name == "shr.b32" else word << places & 0xFFFFFFFF
        elif name == "and.b32":
            made = values[0] & values[1]
        elif name == "lop3.b32":
            assert values[3] == 0xEA, "the table of (a & b) | c"
            made = values[0] & values[1] | values[2]
        else:
            left, right = as_pair(values[0]), as_pair(values[1])
            made = as_word(left - right if name == "sub.bf16x2" else left * right)
        registers[target] = made
    return [as_pair(registers[f"${number}"]) for number in range(slices)]


@pytest.mark.feature("V4")
@pytest.mark.parametrize("kind", WORD_KINDS, ids=str)
def test_the_code_makes_the_numbers_that_were_packed(kind: WeightKind) -> None:
    noise, slices = torch.Generator().manual_seed(1), count_slices(kind)
    bits = 8 if kind is WeightKind.INT8 else 4
    codes = torch.randint(0, 2**bits, (64, slices * SLICE), generator=noise).to(torch.uint8)
    words = pack_words(codes, kind, 64, SLICE)[0, 0]
    numbers = codes[5].view(slices, SLICE)
    pairs = {WeightKind.INT8: 0, WeightKind.INT4: 2, WeightKind.FP4_E2M1: 8}[kind]
    # Zeros 0 and 1, or powers of two 1 and 1/8 in turns, in both halves of a word.
    halves = [253 << 7, 250 << 7] * 4 if kind is WeightKind.FP4_E2M1 else [0x4300, 0x4301]
    extras = [half * 0x10001 for half in halves[:pairs]]
    code, places = write_code(kind, pairs)
    assert places.count("=&r") == slices and places.count("r") == slices + 2 + 2 * pairs
    for column in range(0, SLICE, 2):
        given = [int(words[5, column]), int(words[5, column + 1])]
        found = run(code, slices, given + [each for each in extras for _ in range(2)])
        for number in range(slices):
            pair = numbers[number, column : column + 2]
            if kind is WeightKind.INT8:
                expected = pair.view(torch.int8).float()
            elif kind is WeightKind.INT4:
                expected = pair.float() - number * 2 // slices
            else:
                signs = 1 - 2 * (pair >> 3).float()
                expected = torch.tensor(FP4)[pair.int() & 7] * signs / (8 if number % 2 else 1)
            assert torch.equal(found[number].float(), expected), (kind, column, number)
