"""DeepSeek-V2 and V3 through the whole engine: the tokens and log-probabilities of transformers,
however steps are cut, whoever is beside a row and whatever fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import replayed_sdpa
import torch
from attrs import frozen
from engine_parity import MAX_TOKENS, PROMPTS, Answer, answer_alone, assert_equal, counted, generate
from families import YARN, Case
from fault_injection import start_with_faults
from often import often

from headstock.execution.buffers import Buffers
from headstock_conformance.model.parity import write
from headstock_cuda_graph.runner import CudaGraphRunner

CASES = (
    Case(
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "attention_bias": True,
            "routed_scaling_factor": 1.7,
            "rope_theta": 300.0,
        },
    ),
    Case("deepseek_v3", {"rope_scaling": YARN, "rms_norm_eps": 0.01}),
)


@frozen
class Served:
    """A checkpoint, and what transformers makes of the prompts."""

    checkpoint: Path
    reference: list[Answer]


@pytest.fixture(scope="module", params=often(1, CASES[::-1]), ids=lambda case: case.model_type)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A small model of either family, dense layers and layers with experts."""
    folder = tmp_path_factory.mktemp(request.param.model_type)
    write(folder, request.param.hf)
    return Served(folder, answer_alone(folder))


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[None]:
    """A backend and a runner for graphs that compute again."""
    with replayed_sdpa.installed(tmp_path):
        yield


def assert_all_equal(outputs: Sequence[Any], reference: Sequence[Answer]) -> None:
    """The tokens and log-probabilities of every prompt."""
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)


WAYS: Sequence[dict[str, Any]] = (
    {"max_batch_tokens": 9, "max_running_requests": 7, "overlap": False},
    {"ops": "torch", "max_batch_tokens": 17, "max_running_requests": 5},
    {"ops": "onednn", "scheduler": "prefill-first", "page_size": 1, "num_pages": 300},
    {"ops": "fbgemm", "scheduler": "decode-first", "cache_type": "naive"},
    {"kv_cache": False, "max_batch_tokens": 40, "attn": "sdpa,sdpa"},
    {"paged_attn": "off", "page_size": "auto", "num_pages": None, "max_running_requests": 3},
    {"max_batch_tokens": 1, "max_running_requests": 1},
    {},
)


@pytest.mark.feature("T6", "P11")
@pytest.mark.parametrize("settings", often(2, WAYS), ids=str)
def test_tokens_are_those_of_transformers(settings: dict[str, Any], served: Served) -> None:
    outputs, _ = generate(served.checkpoint, **settings)

    assert_all_equal(outputs, served.reference)


@pytest.mark.feature("T6")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_preempted_rows_make_the_same_tokens(overlap: bool, served: Served) -> None:
    settings = {"page_size": 2, "num_pages": 26, "max_seq_len": 41, "max_batch_tokens": 11}
    outputs, engine = generate(served.checkpoint, overlap=overlap, **settings)

    assert engine.stats().preemptions > 0
    assert_all_equal(outputs, served.reference)


@pytest.mark.feature("P11")
@pytest.mark.parametrize("shared_prefix", often(1, ["on", "off"]))
def test_latent_pages_of_a_prefix_are_reused(shared_prefix: str, served: Served) -> None:
    prompt = PROMPTS[-1]
    prompts = [prompt, prompt, prompt[:17], [*prompt[:13], 5, 9]]
    options = (f"sdpa.shared_prefix={shared_prefix}",)
    outputs, engine = generate(served.checkpoint, prompts=prompts, opt=options)

    # Three whole pages of the shortest common beginning, more of the others.
    assert engine.stats().cached_tokens >= 28 + 16 + 12
    assert ("prefix reuse", "on", "cache_type (--cache-type) radix") in engine.summary.table
    answer = served.reference[-1]
    for number in (0, 1):
        assert_equal(outputs[number], answer, number)
    for number in (2, 3):
        (alone,), _ = generate(served.checkpoint, prompts=prompts[number : number + 1])
        assert outputs[number].token_ids == alone.token_ids


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        [
            {"max_batch_tokens": 11, "max_running_requests": 7, "num_pages": 26, "overlap": False},
            {},
        ],
    ),
    ids=str,
)
def test_replayed_steps_give_the_tokens_of_transformers(
    settings: dict[str, Any],
    served: Served,
    replayed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    for name in ("replay_rows", "replay_prompts"):
        monkeypatch.setattr(CudaGraphRunner, name, counted(name, counts))
    outputs, _ = generate(
        served.checkpoint, attn="sdpa-replayed", runner=replayed_sdpa.RUNNER, **settings
    )

    assert counts["replay_rows"] > 5 and counts["replay_prompts"]
    assert_all_equal(outputs, served.reference)


@pytest.mark.parametrize("runner", often(1, [replayed_sdpa.RUNNER, "eager"]))
def test_a_failing_row_leaves_its_neighbours_and_finite_pages(
    runner: str,
    served: Served,
    replayed: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    found: list[bool] = []
    clean = Buffers.zero_non_finite

    def watched(buffers: Buffers, rows: Any, tables: Any) -> None:
        pages = tables[0][torch.from_numpy(rows)].long()
        latent = buffers.kv[2].latent
        assert latent is not None
        found.append(bool(latent[pages].isnan().any()))
        clean(buffers, rows, tables)
        assert latent[pages].isfinite().all()

    monkeypatch.setattr(Buffers, "zero_non_finite", watched)
    settings = {"attn": "sdpa-replayed", "ops": "torch", "max_batch_tokens": 19}
    outputs, _ = generate(
        served.checkpoint,
        runner=runner,
        max_running_requests=3,
        start=start_with_faults("nan@3:1", "nan@9:0"),
        **settings,
    )

    failed = [output for output in outputs if output.finish_reason == "error"]
    assert len(failed) == 2 and found == [True, True]
    for number, (output, answer) in enumerate(zip(outputs, served.reference, strict=True)):
        assert_equal(output, answer, number)
        assert output in failed or len(output.token_ids) == MAX_TOKENS


def test_the_summary_has_one_vector_a_token_and_reuse(served: Served) -> None:
    _, engine = generate(served.checkpoint, max_running_requests=5, num_pages=40)
    summary = engine.summary

    assert ("prefix reuse", "on", "cache_type (--cache-type) radix") in summary.table
    # 24 + 8 numbers of four bytes, four tokens, three layers
    assert [line.strip() for line in summary.memory[2:]] == [
        "KV pool   40 pages of 4 = 160 tokens, 1.5 KiB a page"
    ]
    operations = [value for name, value, _ in summary.table if name == "operations"]
    assert operations == ["all composed"]
