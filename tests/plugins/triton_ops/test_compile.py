"""Triton's compiler takes every kernel, for the oldest GPUs that are claimed and for Hopper,
without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from headstock.spi import Experts, Sampling
from headstock_triton.activation import fused_silu_and_mul
from headstock_triton.experts import fused_mix_experts
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import small_linear
from headstock_triton.norm import add_norm, embed_norm
from headstock_triton.sampler import fused_sample
from headstock_triton.tiles import Tile, Tiles
from headstock_triton.truncation import SORTED_ROWS

OPTIONS = ("num_warps", "num_stages")


@pytest.fixture(params=[80, 90], ids=lambda capability: f"sm_{capability}")
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were compiled in place of being launched."""
    names: list[str] = []

    def launch(
        kernel: JITFunction[Any], *arguments: Any, grid: object, warmup: bool, **more: Any
    ) -> None:
        options = {name: more.pop(name) for name in OPTIONS if name in more}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | more
        fixed = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        signature = {
            name: "constexpr" if name in fixed else mangle_type(each)
            for name, each in given.items()
        }
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, fixed)
        triton.compile(source, target=GPUTarget("cuda", request.param, 32), options=options)
        names.append(kernel.__name__)

    monkeypatch.setattr(JITFunction, "run", launch)
    return names


ROUTED = ["route_kernel", "gate_up_tiles_kernel", "down_tiles_kernel", "combine_kernel"]
HOPPER = Tiles(rows=64, gate_up=Tile(n=64, k=64, tma=True), down=Tile(n=64, k=64, swap=True))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_norms_and_activation(compiled: list[str]) -> None:
    x, weight = tensor(3, 1024), tensor(1024)

    add_norm(x, None, weight, 1e-6)
    add_norm(x, x, weight, 1e-6)
    embed_norm(tensor(3, dtype=torch.int64), x, weight, 1e-6)
    fused_silu_and_mul(x)

    assert compiled == [
        "add_norm_kernel",
        "add_norm_kernel",
        "embed_norm_kernel",
        "silu_and_mul_kernel",
    ]


def test_products_of_a_few_tokens(compiled: list[str]) -> None:
    for tokens in (1, 16):
        small_linear(tensor(tokens, 1024), tensor(4096, 1024), tensor(4096))

    assert compiled == ["single_kernel", "few_kernel"]


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        (1, ["route_kernel", "gate_up_rows_kernel", "down_rows_kernel"]),
        (16, ROUTED),
        (100, ROUTED),
        (600, ["route_kernel", "place_kernel", *ROUTED[1:]]),
    ],
)
def test_experts(compiled: list[str], tokens: int, kernels: list[str]) -> None:
    mix(tokens, None)

    assert compiled == kernels


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_experts_whose_weights_come_by_the_tensor_memory_accelerator(compiled: list[str]) -> None:
    mix(64, HOPPER)

    assert compiled == ROUTED


def mix(tokens: int, tiles: Tiles | None) -> None:
    """What the experts of a step make of so many tokens."""
    experts = Experts(count=16, per_token=2, intermediate=192, renormalize=True)
    x, scores, slots = tensor(tokens, 512), tensor(tokens, 16), tensor(tokens, dtype=torch.int64)
    fused_mix_experts(
        x,
        scores,
        experts,
        tensor(16, 384, 512),
        tensor(16, 512, 192),
        slots=slots,
        page_size=64,
        tiles=tiles,
    )


@pytest.mark.parametrize(("tokens", "rope_dim"), [(3, 128), (100, 64)])
def test_heads(compiled: list[str], tokens: int, rope_dim: int) -> None:
    whole = tensor(tokens, dtype=torch.int64)
    table = tensor(40, 2, rope_dim // 2, dtype=torch.float32)

    rope_and_store_kv(
        tensor(tokens, 4096),
        tensor(24, 128),
        table,
        whole,
        whole,
        tensor(9, 2, 64, 8, 128),
        heads=16,
        eps=1e-6,
    )

    assert compiled == ["heads_kernel"]


ROWS = SORTED_ROWS + 1
SAMPLINGS: dict[str, Callable[[], Sampling]] = {
    "greedy": Sampling,
    "temperature": lambda: Sampling(**warm()),
    "cut": lambda: Sampling(
        **warm(),
        top_k=tensor(ROWS, dtype=torch.int64),
        top_p=torch.ones(ROWS),
        min_p=torch.ones(ROWS),
        top_logprobs=0,
    ),
}


def warm() -> dict[str, torch.Tensor]:
    """What rows with a temperature need."""
    whole = tensor(ROWS, dtype=torch.int64)
    return {"temperature": torch.ones(ROWS), "seeds": whole, "positions": whole}


@pytest.mark.parametrize("asked", SAMPLINGS)
def test_sampling(compiled: list[str], asked: str) -> None:
    fused_sample(tensor(ROWS, 151_936), SAMPLINGS[asked]())

    assert compiled == [*["cut_kernel"] * (asked == "cut"), "part_kernel", "join_kernel"]
