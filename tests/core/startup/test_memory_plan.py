"""Sizing the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.nn.decoder_config import decoder_config
from headstock.spi import ModelConfig
from headstock.startup.device import free_bytes
from headstock.startup.host_memory import MemoryBounds, read_container_memory, unwritten_bytes
from headstock.startup.memory_plan import (
    MemoryPlan,
    draw_memory_bar,
    estimate_memory_use,
    format_bytes,
    page_bytes,
    plan_memory,
)

GIB = 2**30


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
    free: int = 40 * GIB, weights: int = 10 * GIB, most_tokens: int = 10**9, **settings: Any
) -> MemoryPlan:
    """The plan for a 7B shape in float16 with pages of 16."""
    return plan_memory(
        EngineConfig(**settings),
        model=model(),
        page_size=16,
        kv_dtype=torch.float16,
        weights=weights,
        other_use=estimate_memory_use(model(), 8192, 256, 2),
        free=free,
        max_useful_tokens=most_tokens,
    )


@pytest.mark.feature("H14")
def test_kv_bytes_are_exact() -> None:
    assert 1024 * page_bytes(model(), 16, torch.float16) == 8_589_934_592


@pytest.mark.feature("P2")
def test_a_pool_from_megabytes_counts_the_dummy_page() -> None:
    megabytes = 8192 + 8

    assert plan(kv_memory_mb=megabytes).num_pages == 1024
    assert plan(kv_memory_mb=megabytes - 1).num_pages == 1023


@pytest.mark.feature("P3")
def test_a_pool_from_a_fraction_of_free_memory() -> None:
    page = page_bytes(model(), 16, torch.float16)
    extra = estimate_memory_use(model(), 8192, 256, 2).total

    assert plan(memory_ratio=0.5).num_pages == (20 * GIB - 10 * GIB - extra) // page - 1


@pytest.mark.feature("P4")
def test_a_pool_from_a_context_length() -> None:
    assert plan(kv_context_len=4096).num_pages == 256
    assert plan(kv_context_len=4097).num_pages == 257


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
    assert plan(num_pages=pages).num_pages == pages


@pytest.mark.feature("P2", "P3", "P4")
def test_too_small_or_too_large_names_both_numbers() -> None:
    with pytest.raises(
        CannotRun, match=r"--memory-ratio 0\.25: .*at least 2 pages of 8\.0 MiB.* 0 B are left"
    ):
        plan(memory_ratio=0.25)
    with pytest.raises(CannotRun, match=r"--kv-memory-mb 8: .*at least 2 pages of 8\.0 MiB"):
        plan(kv_memory_mb=8)
    with pytest.raises(
        CannotRun,
        match=r"--num-pages 4000: the KV pool would take 31\.26 GiB, and 29\.31 GiB are free",
    ):
        plan(num_pages=4000)


def test_the_pool_is_no_larger_than_all_rows_can_fill() -> None:
    assert plan(most_tokens=1000).num_pages == 63


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
    assert draw_memory_bar((25, 25, 25), 100, 8).startswith("[##==++..]")


@pytest.mark.feature("P3")
def test_free_memory_is_what_a_container_leaves(tmp_path: Path) -> None:
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert read_container_memory(tmp_path) == MemoryBounds(700, 1000)


@pytest.mark.feature("P3")
def test_what_this_process_has_allocated_and_not_written_is_not_free(tmp_path: Path) -> None:
    before, slack = unwritten_bytes(), 64 << 20
    pool = np.zeros(GIB // 4, np.uint8)
    assert abs(unwritten_bytes() - before - GIB // 4) < slack
    pool[:] = 1
    assert abs(unwritten_bytes() - before) < slack
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 60
    (tmp_path / "status").write_text(
        "Name:\tx\nVmData:\t 5000 kB\nRssAnon:\t 1000 kB\nVmSwap:\t 500 kB\n"
    )
    assert unwritten_bytes(tmp_path / "status") == 3500 * 1024
    assert unwritten_bytes(tmp_path / "none") == 0  # another system
