"""Mixtures of experts in 4 bits against the numbers that these stand for."""

from __future__ import annotations

import expert_cases as cases
import ops_cases
import pytest
import torch
from expert_cases import Mixture
from often import often

from headstock.spi import ParamSpec, Role, Weight, WeightFormat, WeightKind
from headstock_triton.packed import can_mix, prepare_experts
from headstock_triton.word_experts import WordExperts

FP4, INT4 = WeightKind.FP4_E2M1, WeightKind.INT4


@pytest.mark.parametrize(
    ("tokens", "sizes", "kind", "group", "by_powers"),
    often(
        3,
        [
            (3, (160, 48), FP4, 32, True),  # neither whole units nor whole tiles
            (1, (128, 32), INT4, 32, True),
            (2, (64, 32), FP4, 16, False),
            (40, (96, 32), INT4, 128, True),
            (300, (32, 32), FP4, 32, True),
            (2, (384, 48), INT4, 256, True),
            (17, (64, 160), INT4, 64, True),
            (9, (48, 64), FP4, 32, False),
        ],
    ),
)
def test_experts_in_4_bits(
    tokens: int, sizes: tuple[int, int], kind: WeightKind, group: int, by_powers: bool
) -> None:
    case = Mixture(tokens=tokens, count=6, chosen=2, hidden=sizes[0], inters=sizes[1])
    for has_zeros in (False, True)[: 1 + (kind is INT4)]:
        format = WeightFormat(kind=kind, group=(1, group), has_zeros=has_zeros)
        cases.packed_case(case, format, torch.bfloat16, "cpu", None, by_powers=by_powers)


def test_one_map_in_4_bits_is_multiplied_beside_another_form() -> None:
    case = Mixture(tokens=3, count=4, chosen=2, hidden=64, inters=32)
    weights = cases.draw_weights(case, torch.bfloat16, "cpu")
    x, scores = cases.draw_tokens(case, torch.bfloat16, "cpu")
    fours = WeightFormat(kind=FP4, group=(1, 32))
    eights = WeightFormat(kind=WeightKind.FP8_E4M3, group=(1, 64))
    for formats in ((fours, None), (None, fours), (eights, fours)):
        packed, plain = [], []
        for tensor, format in zip(weights, formats, strict=True):
            each, numbers = Weight(tensor=tensor), tensor.float()
            if format is not None:
                each, numbers = cases.pack_experts(tensor, format, "cpu")
            packed.append(each)
            plain.append(numbers)
        exact = cases.mix_exactly(case, x, scores, *plain)
        found = cases.mix_experts(x, scores, case.experts, *packed)
        ops_cases.within(ops_cases.error(found, exact), torch.bfloat16)


def test_4_bits_are_those_of_the_whole_range_of_scales() -> None:
    powers = torch.tensor([2.0**-126, 1.0, 2.0**60, 2.0**-60]).expand(1, 32, 4).clone()
    powers[:, 1::2] = 2.0**-127
    numbers = torch.randint(0, 256, (1, 32, 64), dtype=torch.uint8)
    format = WeightFormat(kind=FP4, group=(1, 32))

    packed = prepare_experts(Weight(tensor=numbers, scales=powers, format=format))

    assert isinstance(packed, WordExperts)
    assert packed.scales is not None
    exponents = (packed.extras[0, 0, 0, 0, 0] >> torch.arange(0, 32, 8)) & 0xFF
    # 2^60 is 2^126 beside the largest of its row, and 186 powers below it are none.
    assert exponents.tolist() == [253 - 186, 253 - 60, 253, 253 - 120]
    assert packed.scales[0, 0, :2].tolist() == [2.0**60, 2.0**-127]


def test_experts_whose_groups_do_not_fit_are_left_to_be_made_plain() -> None:
    spec = ParamSpec(shape=(4, 64, 96), roles=frozenset({Role.EXPERTS}))
    for kind, group, has_zeros, dtype, is_taken in (
        (FP4, (1, 32), False, torch.bfloat16, True),
        (INT4, (1, 96), True, torch.bfloat16, True),
        (FP4, (1, 32), False, torch.float16, False),
        (INT4, (1, 48), False, torch.bfloat16, False),
        (INT4, (32, 32), False, torch.bfloat16, False),
        (INT4, (1, 16), True, torch.bfloat16, False),
    ):
        format = WeightFormat(kind=kind, group=group, has_zeros=has_zeros)
        assert can_mix(spec, format, dtype) is is_taken, format
