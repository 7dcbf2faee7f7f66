"""Linear maps are kept in half the bytes only where float32 would not tell the difference."""

from __future__ import annotations

import pytest
import torch

from headstock.ops.fbgemm_ops import SMALL_PRODUCT, FbgemmOps, HalfWeight, fits_float16
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ParamSpec, Role, Weight

LINEAR = ParamSpec(shape=(), roles=frozenset((Role.LINEAR,)))
TIED = ParamSpec(shape=(), roles=frozenset((Role.EMBEDDING, Role.HEAD)))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_fit(dtype: torch.dtype) -> None:
    assert fits_float16(rounded(noise(96, 64) * 0.02, dtype))


@pytest.mark.parametrize(
    "weight",
    [
        noise(96, 64) * 0.02,  # a fraction of 24 bits
        rounded(noise(96, 64) * 1e-6, torch.bfloat16),  # below what float16 holds
        rounded(noise(96, 64) * 1e5, torch.bfloat16),  # above it
    ],
    ids=["float32", "tiny", "huge"],
)
def test_others_do_not_fit_and_stay_in_float32(weight: torch.Tensor) -> None:
    assert not fits_float16(weight)
    assert not isinstance(FbgemmOps().prepare(LINEAR, Weight(tensor=weight)), HalfWeight)


def test_one_bad_row_is_enough_not_to_fit() -> None:
    weight = rounded(noise(96, 64) * 0.02, torch.bfloat16)
    weight[7] *= 1 / 3

    assert not fits_float16(weight)


@pytest.mark.parametrize("tokens", [1, 3, 32, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_plain_weight(tokens: int, with_bias: bool) -> None:
    ops, x = FbgemmOps(), noise(tokens, 192, seed=1)
    weight = Weight(
        tensor=rounded(noise(320, 192) * 0.02, torch.bfloat16),
        bias=noise(320, seed=2) if with_bias else None,
    )
    packed = ops.prepare(LINEAR, weight)

    assert isinstance(packed, HalfWeight)
    torch.testing.assert_close(
        ops.linear(x, packed, None), TorchOps().linear(x, weight, None), atol=2e-6, rtol=1e-5
    )


def test_small_products_are_made_by_one_thread_and_large_maps_have_none() -> None:
    small = FbgemmOps().prepare(LINEAR, Weight(tensor=rounded(noise(96, 64), torch.bfloat16)))
    large = FbgemmOps().prepare(LINEAR, Weight(tensor=rounded(noise(2048, 1025), torch.bfloat16)))

    assert (
        isinstance(small, HalfWeight)
        and small.one_thread_weight is not None
        and small.max_small_tokens == SMALL_PRODUCT // (96 * 64)
    )
    assert (
        isinstance(large, HalfWeight)
        and large.one_thread_weight is None
        and large.max_small_tokens == 0
    )


@pytest.mark.parametrize(
    ("spec", "shape", "nbytes"),
    [
        (LINEAR, (128, 1024), 2 * 2 * 128 * 1024),
        # Blocks of 64 x 512; `test_load_memory.py` sees that this is what they take.
        (LINEAR, (96, 64), 2 * 2 * 128 * 512),
        (LINEAR, (2048, 1025), 2 * 2048 * 1536),
        (TIED, (96, 64), 2 * 2 * 128 * 512 + 2 * 96 * 64),
    ],
    ids=["whole-blocks", "small", "large", "tied"],
)
def test_the_bytes_of_every_form_count(
    spec: ParamSpec, shape: tuple[int, int], nbytes: int
) -> None:
    found = FbgemmOps().prepare(spec, Weight(tensor=rounded(noise(*shape), torch.bfloat16)))

    assert found.nbytes == nbytes


def test_a_tied_embedding_is_looked_up_and_multiplied_by() -> None:
    ops, weight = FbgemmOps(), Weight(tensor=rounded(noise(96, 64), torch.bfloat16))
    packed, x, tokens = ops.prepare(TIED, weight), noise(5, 64, seed=1), torch.tensor([3, 95, 3])

    torch.testing.assert_close(ops.lookup(tokens, packed), weight.tensor[tokens], atol=1e-7, rtol=0)
    torch.testing.assert_close(
        ops.linear(x, packed, None), x @ weight.tensor.T, atol=2e-5, rtol=1e-5
    )


def test_an_embedding_of_float32_stays_as_it_is() -> None:
    ops, weight = FbgemmOps(), Weight(tensor=noise(96, 64))
    tokens = torch.tensor([3, 95, 3])

    assert ops.prepare(TIED, weight) is weight
    torch.testing.assert_close(ops.lookup(tokens, weight), weight.tensor[tokens], atol=0, rtol=0)
