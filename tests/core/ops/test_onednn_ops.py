"""Products with packed weights: the same numbers for any rows, by few kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headstock.config import EngineConfig
from headstock.ops.onednn_ops import KERNEL_BYTES, OneDnnOps, round_rows
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Params, ParamSpec, Role, Weight
from headstock.startup.build import build_engine

LINEAR = ParamSpec(shape=(), roles=frozenset((Role.LINEAR,)))

SIZES_TO_1024 = 32 + 5 * 8
"""Each up to 32, and 8 in each doubling."""

PRODUCTS = """
import torch
from headstock.ops.onednn_ops import OneDnnOps
from headstock.spi import ParamSpec, Role, Weight

LINEAR = ParamSpec(shape=(), roles=frozenset((Role.LINEAR,)))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

ops = OneDnnOps(least_packed_bytes=0)
weights = [ops.prepare(LINEAR, Weight(tensor=torch.randn(48, 32))) for _ in range(2)]
x = torch.randn(1024, 32)
ops.linear(x, weights[0], None)
before = resident()
for rows in range(1, 1025):
    for weight in weights:
        ops.linear(x[:rows], weight, None)
print(resident() - before, ops.count_kernel_bytes(dict(enumerate(weights)), 1024))
"""


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 36, 100, 129, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_plain_weight_whatever_the_rows(
    rows: int, with_bias: bool
) -> None:
    ops, x = OneDnnOps(least_packed_bytes=0), noise(rows, 48, seed=1)
    weight = Weight(tensor=noise(80, 48), bias=noise(80, seed=2) if with_bias else None)
    packed = ops.prepare(LINEAR, weight)

    assert packed.tensor.is_mkldnn
    out = ops.linear(x, packed, None)
    assert out.shape == (rows, 80) and out.is_contiguous()
    torch.testing.assert_close(out, TorchOps().linear(x, weight, None), atol=2e-5, rtol=1e-5)


def test_a_small_map_stays_plain_and_keeps_no_kernels() -> None:
    ops, x = OneDnnOps(), noise(9, 48, seed=1)
    small = ops.prepare(LINEAR, Weight(tensor=noise(80, 48), bias=noise(80, seed=2)))
    large = ops.prepare(LINEAR, Weight(tensor=noise(512, 256)))

    assert not small.tensor.is_mkldnn and large.tensor.is_mkldnn
    assert torch.equal(ops.linear(x, small, None), TorchOps().linear(x, small, None))
    maps = {"small": small, "large": large}
    few = ops.count_kernel_bytes({"large": large}, 1024)
    assert ops.count_kernel_bytes(maps, 1024) == few > 0


def test_rows_are_rounded_up_by_an_eighth_at_most_and_few_not_at_all() -> None:
    for rows in range(1, 10_000):
        rounded = round_rows(rows)
        assert rows <= rounded <= max(32, rows * 9 / 8)
        assert rounded == rows or rows > 32
        assert round_rows(rounded) == rounded
    assert len({round_rows(rows) for rows in range(1, 1025)}) == SIZES_TO_1024


@pytest.mark.full
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="Linux says how large a process is"
)
def test_a_thousand_sizes_of_step_make_few_kernels_and_stay_within_the_plan() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env={**os.environ, "ONEDNN_VERBOSE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    made = [
        line
        for line in result.stdout.splitlines()
        if "create:cache_miss" in line and ",inner_product," in line
    ]
    grown, planned = map(int, result.stdout.splitlines()[-1].split())

    assert 0 < len(made) <= SIZES_TO_1024, "a kernel for each number of rows"
    assert 0 < grown <= planned


def test_the_plan_counts_a_kernel_for_each_shape_and_size() -> None:
    ops = OneDnnOps(least_packed_bytes=0)
    maps = {f"layers.{i}.down": ops.prepare(LINEAR, Weight(tensor=noise(80, 48))) for i in range(3)}
    maps["layers.0.qkv"] = ops.prepare(LINEAR, Weight(tensor=noise(96, 48)))
    maps["embed"] = Weight(tensor=noise(96, 48))

    assert ops.count_kernel_bytes(maps, 1024) == 2 * SIZES_TO_1024 * KERNEL_BYTES
    assert ops.count_kernel_bytes(maps, 16) == 2 * 16 * KERNEL_BYTES
    assert ops.count_kernel_bytes({"embed": maps["embed"]}, 1024) == 0


def test_the_memory_plan_leaves_free_what_the_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(ops: TorchOps, params: Params, max_tokens: int) -> int:
        counted.append(max_tokens)
        return 3 << 20

    monkeypatch.setattr(TorchOps, "count_kernel_bytes", count)
    built = build_engine(EngineConfig(device="cpu", ops="torch", num_pages=16, max_batch_tokens=48))
    built.executor.close()

    assert counted == [48]
    assert built.memory.other_use.workspaces == 3 << 20


@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_norms_by_length_are_norms_by_mean_square(size: float) -> None:
    ops, x = OneDnnOps(), noise(5, 3, 12) * size
    norms = ("rms_norm", (12,), Role.NORM), ("head_norm", (3, 12), Role.HEAD_NORM)
    for name, shape, role in norms:
        plain = Weight(tensor=noise(*shape, seed=1))
        spec = ParamSpec(shape=shape, roles=frozenset((role,)))
        for eps in (1e-5, 1e-6):
            found = getattr(ops, name)(x, ops.prepare(spec, plain), eps)
            torch.testing.assert_close(found, getattr(TorchOps(), name)(x, plain, eps))
