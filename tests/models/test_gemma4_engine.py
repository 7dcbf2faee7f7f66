"""Gemma-4 through the whole engine: the tokens and log-probabilities of transformers, whichever
backends serve its two shapes of KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import replayed_sdpa
import torch
from engine_parity import PROMPTS, Answer, answer_alone, assert_equal, counted, generate
from families import BESIDE_MLP, WIDE_HEADS, Case, log_probabilities
from fp8_checkpoints import quantize_directory
from often import often

from headstock import LLM
from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.ops.torch_ops import TorchOps
from headstock.spi import DeviceEnv, IntSet, LayoutKind
from headstock.startup.model_loading import read_model
from headstock.startup.operation_tuning import list_attention_candidates
from headstock_conformance.model.parity import write
from headstock_cuda_graph.runner import CudaGraphRunner

CASE = Case(
    "gemma4_text",
    {
        **WIDE_HEADS,
        **BESIDE_MLP,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": False,
    },
)
CHUNKS = {"max_batch_tokens": 7, "max_running_requests": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma-4 with experts, of one layer with a window and two without."""
    folder = tmp_path_factory.mktemp("gemma4")
    write(folder, CASE.hf)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Answer]:
    """What transformers makes of each prompt alone."""
    return answer_alone(checkpoint)


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A backend and a runner for graphs that compute again; it has the claims that are put here."""
    claims: dict[str, Any] = {"mixed_groups": False}
    plain = replayed_sdpa.spec()

    def narrow() -> Any:
        return attrs.evolve(plain, capabilities=attrs.evolve(plain.capabilities, **claims))

    monkeypatch.setattr(replayed_sdpa, "spec", narrow)
    with replayed_sdpa.installed(tmp_path):
        yield claims


def assert_all_equal(outputs: Sequence[Any], reference: Sequence[Answer]) -> None:
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


def test_kinds_of_layers_are_groups_of_their_own_shapes(checkpoint: Path) -> None:
    _, config = read_model(checkpoint)

    full, windows = config.kv_groups
    assert (full.layers, windows.layers, windows.window) == ((1, 2), (0,), 5)
    assert [(each.layout.kv_heads, each.layout.k_dim) for each in config.kv_groups] == [  # type: ignore[union-attr]
        (1, 32),
        (2, 16),
    ]
    assert all(each.layout.kind is LayoutKind.FULL for each in config.kv_groups)


def test_values_are_keys_of_a_quantized_checkpoint_too(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    write(plain, CASE.hf)
    quantize_directory(plain, packed, (7, 5))

    ours, theirs = (
        log_probabilities(each, CASE.family, PROMPTS[-1], TorchOps()) for each in (packed, plain)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    often(1, [CHUNKS, {}, {"ops": "torch", **CHUNKS}, {"paged_attn": "off", "page_size": "auto"}]),
    ids=str,
)
def test_tokens_are_those_of_transformers(
    settings: dict[str, Any], checkpoint: Path, reference: list[Answer]
) -> None:
    outputs, _ = generate(checkpoint, **settings)

    assert_all_equal(outputs, reference)


def test_pages_of_both_shapes_are_reused(checkpoint: Path, reference: list[Answer]) -> None:
    outputs, engine = generate(checkpoint, prompts=[PROMPTS[-1]] * 3)

    assert engine.stats().cached_tokens >= 2 * 28
    for number, output in enumerate(outputs):
        assert_equal(output, reference[-1], number)


def test_a_backend_for_each_shape_makes_the_same_tokens(
    checkpoint: Path, reference: list[Answer], replayed: dict[str, Any]
) -> None:
    replayed["head_dims"] = IntSet.of(16)
    outputs, engine = generate(
        checkpoint, attn="sdpa-replayed+sdpa", debug_attention=True, **CHUNKS
    )

    assert engine.summary.attention == "sdpa-replayed+sdpa"
    # `sdpa` runs in no graph, and so do both.
    assert engine.summary.runner == "eager"
    assert_all_equal(outputs, reference)
    with pytest.raises(
        CannotRun, match=r"^KV groups 0: .*head_dim 32 .* to sdpa-replayed\+sdpa\.$"
    ):
        LLM(str(checkpoint), attn="sdpa-replayed", num_pages=64, page_size=4)


def test_replayed_steps_of_one_backend_twice_make_the_same_tokens(
    checkpoint: Path,
    reference: list[Answer],
    replayed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    for name in ("replay_rows", "replay_prompts"):
        monkeypatch.setattr(CudaGraphRunner, name, counted(name, counts))
    outputs, engine = generate(checkpoint, attn="sdpa-replayed", runner=replayed_sdpa.RUNNER)

    assert counts["replay_rows"] > 5 and counts["replay_prompts"]
    assert engine.summary.attention == "sdpa-replayed"
    assert_all_equal(outputs, reference)


def test_what_tune_measures_has_a_backend_for_each_group(checkpoint: Path) -> None:
    h200 = DeviceEnv(device="cuda", capability=(9, 0))
    candidates = list_attention_candidates(EngineConfig(model=str(checkpoint)), h200)

    assert candidates[0] == "+".join(dict.fromkeys(each.split("+")[0] for each in candidates))
    assert {each.count("+") for each in candidates} == {len(candidates) - 1}
    named = EngineConfig(model=str(checkpoint), attn="fa")
    assert list_attention_candidates(named, h200) == ("fa",)
