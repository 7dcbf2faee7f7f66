"""The least time of a workload: against figures that were counted by hand, and as properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headstock import UsageError
from headstock.spi import LayerSizes, ModelConfig
from headstock.startup.model_loading import read_family
from headstock_bench import command
from headstock_bench.limits import (
    SECONDS,
    DeviceRates,
    count_shared,
    count_work,
    limit_workload,
    measure_rates,
    time_settled,
)
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import WORKLOADS, Workload

H200 = DeviceRates(bytes_s=4.27e12, flops_s=790e12)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """The published architectures, by name."""
    found = {}
    for name, shape in MODEL_SHAPES.items():
        folder = tmp_path_factory.mktemp("shape") / name
        write_model_directory(shape, folder)
        found[name] = read_family(folder, "auto", ()).config
    return found


def limit(model: ModelConfig, workload: Workload, rates: DeviceRates = H200) -> float:
    """The least seconds in 16 bits."""
    return limit_workload(model, workload, rates, weight_bytes=2, kv_bytes=2).seconds


def work_of(prompts: list[list[int]], outputs: list[int]) -> Workload:
    """A workload of these prompts."""
    return Workload(
        name="work", prompts=tuple(map(tuple, prompts)), outputs=tuple(outputs), temperature=0.0
    )


@pytest.mark.feature("V9")
# By hand, on 2026-11-20, from tokens, bytes and multiplications of these models: to 5 %, but for
# prefills, where attention was counted with whole contexts.
@pytest.mark.parametrize(
    ("shape", "workload", "tokens", "per_second"),
    [
        ("qwen3-0.6b", "single", "out", 3_500),
        ("qwen3-0.6b", "offline256", "out", 37_000),
        ("qwen3-0.6b", "prefix256", "in", 3_700_000),
        ("qwen3-8b", "single", "out", 285),
        ("qwen3-8b", "offline256", "out", 12_500),
        ("qwen3-8b", "prefix256", "in", 530_000),
    ],
)
def test_limits_are_those_that_were_counted_by_hand(
    models: dict[str, ModelConfig], shape: str, workload: str, tokens: str, per_second: int
) -> None:
    work = WORKLOADS[workload]()
    count = work.tokens_out if tokens == "out" else work.tokens_in

    assert count / limit(models[shape], work) == pytest.approx(per_second, rel=0.05)


def test_elements_are_those_of_the_weights(models: dict[str, ModelConfig]) -> None:
    work = count_work(models["qwen3-0.6b"])
    layer = 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072

    assert work.dense == work.active == 28 * layer
    assert work.head == 151_936 * 1024 and work.kv == 28 * 2 * 8 * 128


def test_layers_count_by_their_own_sizes(models: dict[str, ModelConfig]) -> None:
    model = models["qwen3-0.6b"]
    wide = LayerSizes(heads=4, kv_heads=2, head_dim=256, intermediate=100)
    layers = (*model.layers[:-1], evolve(model.layers[-1], sizes=wide))
    before, after = count_work(model), count_work(evolve(model, layers=layers))
    layer = 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072
    other = 1024 * 256 * (2 * 4 + 2 * 2) + 3 * 1024 * 100

    assert after.dense - before.dense == other - layer
    assert after.kv - before.kv == 2 * (2 * 256 - 8 * 128)
    assert after.attention - before.attention == 4 * (4 * 256 - 16 * 128)


def test_a_step_reads_the_experts_that_its_tokens_use(models: dict[str, ModelConfig]) -> None:
    work = count_work(models["qwen3-30b-a3b"])
    expert = 3 * 2048 * 768

    assert work.count_read(1) == pytest.approx(work.active)
    assert work.active - work.dense == 48 * 8 * expert
    # 32 tokens read 113 of 128 experts of a layer, as was measured (docs/benchmarks/log.md).
    assert (work.count_read(32) - work.dense) / (48 * expert) == pytest.approx(112, abs=2)


@given(prompts=st.lists(TOKENS, min_size=1, max_size=6), data=st.data())
def test_more_work_takes_longer_and_twice_the_device_half_the_time(
    models: dict[str, ModelConfig], prompts: list[list[int]], data: st.DataObject
) -> None:
    outputs = data.draw(st.lists(st.integers(1, 5), min_size=len(prompts), max_size=len(prompts)))
    model, work = models["demo"], work_of(prompts, outputs)
    seconds = limit(model, work)
    longer = work_of([[*each, 3] for each in prompts], [each + 1 for each in outputs])
    twice = DeviceRates(bytes_s=2 * H200.bytes_s, flops_s=2 * H200.flops_s)

    assert 0 < seconds < limit(model, longer)
    assert limit(model, work, twice) == pytest.approx(seconds / 2)
    # The order of requests changes nothing.
    assert limit(model, work_of(prompts[::-1], outputs[::-1])) == pytest.approx(seconds)


def test_what_prompts_share_is_computed_once_and_read_once_a_step(
    models: dict[str, ModelConfig],
) -> None:
    # A device on which reading costs all.
    rates = DeviceRates(bytes_s=1e9, flops_s=1e30)
    shared = list(range(100))
    alike = work_of([[*shared, 1], [*shared, 2]], [2, 2])
    others = work_of([[*shared, 1], [*shared[::-1], 2]], [2, 2])
    model = models["demo"]
    saved = limit(model, others, rates) - limit(model, alike, rates)

    assert saved == pytest.approx(2 * 100 * count_work(model).kv / 1e9)


@given(TOKENS, TOKENS)
def test_tokens_are_shared_up_to_the_first_that_differs(one: list[int], other: list[int]) -> None:
    count = count_shared(one, other)

    assert one[:count] == other[:count]
    assert (
        one[: count + 1] != other[: count + 1] or one == other or count == min(len(one), len(other))
    )


def test_layers_that_are_not_counted_are_refused_by_name(models: dict[str, ModelConfig]) -> None:
    model = models["demo"]
    layers = (evolve(model.layers[0], latent=object()), *model.layers[1:])

    with pytest.raises(UsageError, match=f"{model.architecture} has others; leave --limits out"):
        count_work(evolve(model, layers=layers))


@pytest.mark.full
def test_rates_are_those_of_a_copy_and_a_product() -> None:
    rates = measure_rates("cpu", torch.float32)

    # Any machine that runs the tests, and none of the next ten years.
    assert 1e8 < rates.bytes_s < 1e13 and 1e8 < rates.flops_s < 1e14


def test_a_device_without_room_is_a_line_with_the_next_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(*size: object, **more: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "zeros", fill)
    with pytest.raises(UsageError, match=r"leave more free by a lower --memory-ratio"):
        measure_rates("cpu", torch.float32)


@pytest.mark.feature("V9")
def test_bench_shows_the_limit_beside_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    flags = ["cpu1", "first-token:16:2", "--runs", "1", "--quiet", "--output", str(file)]
    assert command.main([*flags, "--limits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    figure, latency = figures

    # Of one answer by itself; latencies have none.
    (line,) = (line for line in lines if line.startswith("  limit"))
    assert "GB/s" in line
    # The line has three decimals and the record four, each rounded from the seconds themselves.
    assert float(line.split()[1]) == pytest.approx(figure["limit_s"], abs=5.5e-4 + 1e-9)
    parts = figure["limit_products_s"] + figure["limit_attention_s"]
    assert figure["limit_s"] == pytest.approx(parts, abs=2e-4)
    assert not any(name.startswith("limit") for name in latency)


@pytest.mark.feature("V9")
def test_a_rate_is_that_of_settled_clocks() -> None:
    now = 0.0

    def tire() -> None:
        nonlocal now
        now += 1e-4 if now < SECONDS / 20 else 4e-3

    assert time_settled(tire, "cpu", lambda: now) == pytest.approx(4e-3)
    assert now >= SECONDS
