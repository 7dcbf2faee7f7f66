"""The proposer `draft`: a second model in the same process, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_parity import PROMPTS
from often import often

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CannotRun, UsageError
from headstock.spi import DraftModel, ProposerContext
from headstock.spi.arrays import Ints
from headstock_conformance.model.parity import write
from headstock_draft_proposer.options import DraftOptions
from headstock_draft_proposer.proposer import DraftProposer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, **SIZES}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
PAGES = {"attn": "sdpa", "page_size": 4, "num_pages": 128, "max_seq_len": 48, "debug_canary": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two families with one vocabulary, and one with another."""
    made = {}
    for name, hf in {
        "qwen": QWEN,
        "llama": LLAMA,
        "padded": LLAMA | {"vocab_size": 128},
        "other": LLAMA | {"vocab_size": 4000},
    }.items():
        made[name] = tmp_path_factory.mktemp(name)
        write(made[name], hf)
    return made


def answer(model: Path, **settings: Any) -> tuple[list[list[int]], Any]:
    """The tokens of all prompts, greedy and drawn, twice over, and the engine's counts."""
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=9, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with LLM(str(model), **(PAGES | settings)) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [llm.generate(asked, params) for _ in range(2)]
        return [
            list(each.outputs[0].token_ids) for outputs in found for each in outputs
        ], llm._session.engine.stats()


@pytest.mark.feature("R12")
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        (
            {"max_batch_tokens": 11},
            {"page_size": 2, "num_pages": 40, "max_seq_len": 41, "max_batch_tokens": 11},
            {"overlap": False, "max_running_requests": 3},
        ),
    ),
    ids=str,
)
@pytest.mark.parametrize("small", often(2, ["qwen", "padded", "llama"]))
def test_tokens_are_the_same_with_any_second_model(
    small: str, settings: dict[str, Any], folders: dict[str, Path]
) -> None:
    wanted, _ = answer(folders["qwen"], **settings)
    found, stats = answer(
        folders["qwen"],
        proposer="draft",
        draft_model=str(folders[small]),
        opt=["draft.memory_ratio=0.02"],
        **settings,
    )

    assert found == wanted
    assert stats.draft_tokens > 40
    if small == "qwen":  # which knows every greedy token
        assert stats.accepted_draft_tokens > stats.draft_tokens / 3


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"proposer": "draft"}, UsageError, r"name it by draft_model \(--draft-model\)"),
        ({"draft_model": "x"}, UsageError, "proposer .* off takes no second model"),
        ({"draft_model": "x", "proposer": "ngram"}, UsageError, "ngram takes no second model"),
        ({"proposer": "draft", "draft_model": "other"}, CannotRun, "4000 token ids, and the model"),
    ],
)
def test_what_does_not_go_together_is_refused(
    settings: dict[str, Any], kind: type[Exception], reason: str, folders: dict[str, Path]
) -> None:
    named = settings.get("draft_model")
    if named in folders:
        settings = settings | {"draft_model": str(folders[named])}
    with pytest.raises(kind, match=reason):
        LLM(str(folders["qwen"]), opt=["draft.memory_ratio=0.02"] * (named in folders), **settings)


class Recorded(DraftModel):
    """Says the same token always, and counts what becomes of it."""

    vocab = 96

    def __init__(self) -> None:
        self.num_closed = 0

    def continue_rows(self, tokens: Sequence[Ints], counts: Ints) -> list[Ints]:
        return [np.full(count, 95, np.int32) for count in counts.tolist()]

    def close(self) -> None:
        self.num_closed += 1


def context(model: DraftModel, vocab: int = 96) -> ProposerContext:
    return ProposerContext(
        vocab=vocab,
        max_rows=4,
        max_len=48,
        device="cpu",
        draft_model="small",
        open_model=lambda name, settings: model,
    )


def test_tokens_that_the_large_model_lacks_end_a_draft() -> None:
    model, proposer = Recorded(), DraftProposer(DraftOptions(max_drafts=3))
    proposer.start(context(model, vocab=95))
    rows = [np.array(row, np.int32) for row in ([1], [2, 3])]
    counts, drafts = proposer.propose(rows, np.array([9, 1], np.int32), np.arange(2))

    assert (counts.tolist(), drafts.tolist()) == ([0, 0], [])
    proposer.close()
    proposer.close()
    assert model.num_closed == 1


def test_the_second_model_ends_with_the_engine_and_with_a_start_that_fails(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [Recorded(), Recorded()]
    monkeypatch.setattr("headstock.engine.engine.open_draft_model", lambda *_: models[0])
    settings = {"model": str(folders["qwen"]), "proposer": "draft", "draft_model": "small"}
    engine = Engine(EngineConfig(**PAGES, **settings))
    assert not models[0].num_closed
    engine.close()
    assert models[0].num_closed == 1

    monkeypatch.setattr("headstock.engine.engine.open_draft_model", lambda *_: models[1])
    with pytest.raises(CannotRun, match="KV pool"):
        Engine(EngineConfig(**(PAGES | settings | {"num_pages": (1 << 31) - 1})))
    assert models[1].num_closed == 1


class Watching(DraftProposer):
    """Keeps what it is told."""

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self.asked, self.ended = set[int](), list[int]()

    def start(self, context: ProposerContext) -> None:
        self.context = context
        super().start(context)

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        assert not self.asked.intersection(self.ended) and len(set(ids.tolist())) == len(ids)
        self.asked.update(ids.tolist())
        return super().propose(tokens, room, ids)

    def end(self, ids: Ints) -> None:
        self.asked.difference_update(ids.tolist())
        self.ended += ids.tolist()


def test_a_proposer_is_told_of_the_engine_and_of_its_rows(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Watching] = []

    def make(options: DraftOptions) -> Watching:
        made.append(Watching(options))
        return made[-1]

    monkeypatch.setattr("headstock_draft_proposer.proposer.DraftProposer", make)
    monkeypatch.setattr("headstock.engine.engine.open_draft_model", lambda *_: Recorded())
    settings = {"page_size": 2, "num_pages": 24, "max_seq_len": 41, "max_batch_tokens": 11}
    _, stats = answer(folders["qwen"], proposer="draft", draft_model="small", **settings)

    (proposer,) = made
    found = proposer.context
    assert (found.vocab, found.max_rows, found.max_len, found.device) == (96, 11, 41, "cpu")
    assert stats.preemptions > 0
    # Requests and those that were preempted, each once.
    assert not proposer.asked and len(proposer.ended) == len(set(proposer.ended))
    assert len(proposer.ended) > 2 * len(PROMPTS)


@pytest.mark.feature("R12")
def test_rows_that_began_in_different_steps_get_drafts_together(folders: dict[str, Path]) -> None:
    draft = {"proposer": "draft", "draft_model": str(folders["qwen"])}
    sizes = PAGES | {"max_batch_tokens": 11, "overlap": True, "opt": ["draft.memory_ratio=0.02"]}
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(start, start + 9))} for start in (3, 40)]
    with LLM(str(folders["qwen"]), **draft, **sizes) as llm:
        engine: Any = llm._session.engine
        assert engine.limits.overlap and not engine.summary.overlap
        before = engine.stats().executed_steps
        llm.generate(prompts, params)
        steps = engine.stats().executed_steps - before

    # Two of prompts, then five tokens a step, as all drafts of the model itself are right.
    assert steps <= 2 + 20 // 5 + 1
