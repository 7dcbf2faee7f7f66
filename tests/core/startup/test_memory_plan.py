"""Sizing the pool."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.profiler import ProfilerActivity, profile
from toy_processor import Shift

from headstock.config import EngineConfig
from headstock.config.setting_rules import POOL_SIZES
from headstock.errors import CannotRun
from headstock.nn.decoder_config import decoder_config
from headstock.nn.moe import mix_experts
from headstock.nn.sampler import sample
from headstock.spi import Experts, KVGroup, ModelConfig, Processing, Sampling, StateKV, StateTensor
from headstock.startup.device import free_bytes, reclaim_free_bytes
from headstock.startup.host_memory import MemoryBounds, read_container_memory, unwritten_bytes
from headstock.startup.memory_plan import (
    MemoryPlan,
    MemoryUse,
    draw_memory_bar,
    estimate_memory_use,
    format_bytes,
    plan_memory,
)
from headstock.startup.pool_memory import set_num_pages

GIB = 2**30
PAGE = 16 * 32 * 2 * 32 * 128 * 2
"""Bytes of a page: tokens, layers, keys and values, heads, dimensions, bytes of a number."""


def model(layers: int = 32, kv_heads: int = 32, head_dim: int = 128) -> ModelConfig:
    """A decoder of this shape."""
    hf = {
        "hidden_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 11008,
        "vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    return decoder_config(hf, "LlamaForCausalLM", windows=[None] * layers)


def plan(
    free: int = 40 * GIB, weights: int = 10 * GIB, max_len: int = 10**6, **settings: Any
) -> MemoryPlan:
    """The plan for a 7B shape in float16 with pages of 16."""
    return plan_memory(
        EngineConfig(**settings),
        model=model(),
        page_size=16,
        kv_dtype=torch.float16,
        dtype=torch.float16,
        weights=weights,
        other_use=estimate_memory_use(model(), 8192, 256, 2),
        free=free,
        max_len=max_len,
    )


@pytest.mark.feature("H14")
def test_kv_bytes_are_exact() -> None:
    assert 1024 * PAGE == 8_589_934_592
    assert [terms.page_bytes for terms in plan().groups] == [PAGE]


@pytest.mark.feature("P2")
def test_a_pool_from_megabytes_counts_the_dummy_page() -> None:
    megabytes = 8192 + 8

    assert plan(kv_memory_mb=megabytes).num_pages == (1024,)
    assert plan(kv_memory_mb=megabytes - 1).num_pages == (1023,)


@pytest.mark.feature("P3")
def test_a_pool_from_a_fraction_of_free_memory() -> None:
    page = PAGE
    extra = estimate_memory_use(model(), 8192, 256, 2).total

    assert plan(memory_ratio=0.5).num_pages == ((20 * GIB - 10 * GIB - extra) // page - 1,)


@pytest.mark.feature("P4")
def test_a_pool_from_a_context_length() -> None:
    assert plan(kv_context_len=4096).num_pages == (256,)
    assert plan(kv_context_len=4097).num_pages == (257,)


@pytest.mark.feature("S1")
def test_more_ratio_gives_more_pages() -> None:
    assert (
        plan(memory_ratio=0.6).num_pages
        < plan(memory_ratio=0.8).num_pages
        < plan(memory_ratio=1.0).num_pages
    )


@pytest.mark.feature("S5")
@pytest.mark.parametrize("pages", [1, 7, 1000])
def test_num_pages_gives_exactly_that_many(pages: int) -> None:
    assert plan(num_pages=pages).num_pages == (pages,)


@pytest.mark.feature("P2", "P3", "P4")
def test_too_small_or_too_large_names_both_numbers() -> None:
    with pytest.raises(
        CannotRun,
        match=r"\(--memory-ratio\) 0\.25: .*at least 2 pages of 8\.0 MiB.* 0 B are left",
    ):
        plan(memory_ratio=0.25)
    with pytest.raises(
        CannotRun, match=r"kv_memory_mb \(--kv-memory-mb\) 8: .*at least 2 pages of 8\.0 MiB"
    ):
        plan(kv_memory_mb=8)
    with pytest.raises(
        CannotRun,
        match=r"\(--num-pages\) 4000: .* would take 31\.26 GiB, and 29\.31 GiB are free",
    ):
        plan(num_pages=4000)


def test_the_pool_is_no_larger_than_all_rows_can_fill() -> None:
    assert plan(max_len=1000, max_running_requests=1).num_pages == (63,)


@pytest.mark.feature("T18")
def test_activations_grow_with_the_step_and_the_rows_and_are_printed() -> None:
    small = estimate_memory_use(model(), 1024, 16, 2).total

    assert (
        estimate_memory_use(model(), 2048, 16, 2).total
        > small
        < estimate_memory_use(model(), 1024, 64, 2).total
    )
    assert any("activations" in line for line in plan().lines())


def test_sizes_and_bars_read_well() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 5 * GIB)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
    bar = draw_memory_bar({"weights": 25, "activations": 25, "KV": 25}, 100, 8)
    assert bar.startswith("[##==++..]")


@pytest.mark.feature("P3")
def test_free_memory_is_what_a_container_leaves(tmp_path: Path) -> None:
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert read_container_memory(tmp_path) == MemoryBounds(700, 1000)


@pytest.mark.feature("P3")
def test_a_start_counts_what_closed_engines_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """A cycle, as a closed engine may leave, that holds the device's memory."""

        def __init__(self) -> None:
            self.cycle = self

    held = weakref.ref(Pool())
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 120 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held() is None))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: ((139 if freed else 19) * GIB, 140 * GIB)
    )
    assert reclaim_free_bytes(torch.device("cuda")) == 139 * GIB
    assert freed == [True]  # behind the collection, which frees what the cache then gives back


@pytest.mark.feature("P3")
def test_what_this_process_has_allocated_and_not_written_is_not_free(tmp_path: Path) -> None:
    before, slack = unwritten_bytes(), 64 << 20
    # Not by numpy: malloc may have as much left of earlier tests, already written.
    fresh = mmap.mmap(-1, GIB // 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = np.frombuffer(fresh, np.uint8)
    assert abs(unwritten_bytes() - before - GIB // 4) < slack
    pool[:] = 1
    assert abs(unwritten_bytes() - before) < slack
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 60
    (tmp_path / "status").write_text(
        "Name:\tx\nVmData:\t 5000 kB\nRssAnon:\t 1000 kB\nVmSwap:\t 500 kB\n"
    )
    assert unwritten_bytes(tmp_path / "status") == 3500 * 1024
    assert unwritten_bytes(tmp_path / "none") == 0  # another system


def mixed_model(layers: int = 12, window: int = 512, states: int = 0) -> ModelConfig:
    """Five layers of six see `window` tokens, the sixth sees all; `states` more keep a state."""
    windows = [None if index % 6 == 5 else window for index in range(layers)] + [None] * states
    hf = {
        "hidden_size": 64, "num_hidden_layers": layers + states, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64, "vocab_size": 50,
        "max_position_embeddings": 1 << 20,
    }  # fmt: skip
    model = decoder_config(hf, "LlamaForCausalLM", windows=windows)
    full, *others = model.kv_groups
    state = KVGroup(
        layers=tuple(range(layers, layers + states)),
        layout=StateKV(tensors=(StateTensor("conv", (64, 3)), StateTensor("s", (3,), "float32"))),
    )
    kept = evolve(full, layers=tuple(layer for layer in full.layers if layer < layers))
    return evolve(model, kv_groups=(kept, *others, state) if states else model.kv_groups)


def plan_mixed(model: ModelConfig, max_len: int = 32768, **settings: Any) -> MemoryPlan:
    """A plan in float16 with pages of 16 and nothing else in memory."""
    return plan_memory(
        EngineConfig(**{"max_running_requests": 8, "max_batch_tokens": 1024, **settings}),
        model=model,
        page_size=16,
        kv_dtype=torch.float16,
        dtype=torch.float16,
        weights=0,
        other_use=MemoryUse(activations=0),
        free=8 * GIB,
        max_len=max_len,
    )


LAYER_PAGE = 16 * 2 * 4 * 16 * 2
"""Bytes of a page of one layer: tokens, keys and values, heads, dimensions, bytes of a number."""


def test_a_window_group_costs_its_window() -> None:
    """8 rows of 32,768 tokens: 2 of 12 layers keep them all, 10 keep 512 and a step's chunk."""
    full, window = plan_mixed(mixed_model()).groups

    assert full.num_pages == 8 * 2048 and full.page_bytes == 2 * LAYER_PAGE
    # 527 tokens before the next one and what may be in flight, which begin anywhere in a page; a
    # page that is not full; and 1,024 tokens of a step for all rows together.
    assert window.num_pages == 8 * (33 + 1 + 1) + 64 and window.page_bytes == 10 * LAYER_PAGE
    assert window.total_bytes < full.total_bytes / 9
    # Equal counts would cost six times the full layers.
    assert plan_mixed(mixed_model()).pool < 1.12 * full.total_bytes


@pytest.mark.parametrize("megabytes", [1, 3, 10, 100])
def test_the_context_is_the_longest_whose_pages_fit(megabytes: int) -> None:
    room = megabytes << 20
    made = plan_mixed(mixed_model(states=3), kv_memory_mb=megabytes, max_running_requests=2)
    full, window, state = made.groups

    # 64 x 3 numbers of two bytes, and 3 of four bytes in whole units of 16
    assert (state.num_pages, state.page_bytes, state.page_tokens) == (2, 3 * (384 + 16), 32768)
    assert made.kv_tokens == full.num_pages * 16
    assert window.num_pages == min(full.num_pages, 2 * (33 + 1 + 1) + 64)
    more = full.page_bytes + (window.page_bytes if window.num_pages == full.num_pages else 0)
    assert made.pool <= room < made.pool + more
    assert made.pool == sum((terms.num_pages + 1) * terms.page_bytes for terms in made.groups)


def test_a_model_with_windows_alone_may_have_sequences_longer_than_its_pool() -> None:
    model = mixed_model(layers=5)
    most = 33 + 1 + 64 + 1

    assert plan_mixed(model, num_pages=most).longest == 1 << 20
    assert plan_mixed(model, num_pages=most - 1).longest == (most - 1) * 16
    assert plan_mixed(mixed_model(), num_pages=most).longest == most * 16


def test_each_group_has_a_line_and_the_bar_shows_what_keeps_less() -> None:
    made = plan_mixed(mixed_model(states=3), num_pages=500)

    lines = made.lines()
    assert lines[2:] == [
        "KV pool   8000 tokens in 3 groups",
        "          full, 2 layers: 500 pages of 16, 8.0 KiB a page, 3.9 MiB",
        "          window of 512, 10 layers: 344 pages of 16, 40.0 KiB a page, 13.5 MiB",
        "          state, 3 layers: 8 pages, 1.2 KiB a page, 10.5 KiB",
    ]
    assert lines[1].endswith("  + KV  ~ windows  * states  . free")
    bar = draw_memory_bar({"weights": 25, "KV": 25, "windows": 25, "states": 12}, 100, 8)
    assert bar.startswith("[##++~~*.]")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("processed", [False, True])
def test_what_rules_take_is_in_the_estimate(masked: bool, processed: bool) -> None:
    rows, vocab = 16, model().vocab
    sampling = Sampling(
        mask=torch.full((rows, vocab // 32), -1, dtype=torch.int32) if masked else None,
        processing=Processing(rows=None, parts=((Shift(), COLUMNS),)) if processed else None,
        positions=torch.zeros(rows, dtype=torch.int64),
    )
    logits = torch.randn(rows, vocab)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        sample(logits, sampling)
    held = logits.nbytes + (sampling.mask.nbytes if sampling.mask is not None else 0)
    peak = _find_peak(recorded, held)

    small = estimate_memory_use(model(), 0, 0, 2).activations
    found = estimate_memory_use(
        model(), 0, rows, 2, has_processors=processed, has_masks=masked
    ).activations
    # A vector of the vocabulary is nothing beside a row of scores for each row.
    assert peak <= found - small + 8 * vocab


def test_what_experts_take_is_in_the_estimate() -> None:
    tokens, hidden = 256, 64
    experts = Experts(count=16, per_token=8, intermediate=48, renormalize=True)
    hf = {
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    config = decoder_config(hf, "MixtralForCausalLM", experts=[experts])
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, experts.per_token)
    ids = torch.randint(0, experts.count, (tokens, experts.per_token))
    gate_up = torch.randn(experts.count, 2 * experts.intermediate, hidden)
    down = torch.randn(experts.count, hidden, experts.intermediate)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mix_experts(x, weights, ids, gate_up, down)

    estimate = estimate_memory_use(config, tokens, 0, 4).activations
    assert estimate / 2 < _find_peak(recorded, held=2 * x.nbytes) <= estimate


def _find_peak(recorded: profile, held: int) -> int:
    """The most bytes that were held at once while the profiler recorded.

    held: bytes that were held before
    """
    peak = held
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


COLUMNS = {"by": torch.ones(16, dtype=torch.int64), "begin": torch.zeros(16, dtype=torch.int64)}


@pytest.mark.feature("S19")
@pytest.mark.parametrize("setting", POOL_SIZES)
def test_a_rank_takes_the_pages_of_another_whatever_sized_its_pool(setting: str) -> None:
    value: Any = 0.4 if setting == "memory_ratio" else 500
    config = EngineConfig(model="demo", **{setting: value})

    resized = set_num_pages(config, 60)

    assert resized.num_pages == 60
    assert resized == EngineConfig(model="demo", num_pages=60)
