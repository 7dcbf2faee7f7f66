"""Layers of Qwen3.5 that guess further tokens: their guesses beside transformers' layers, and the
same tokens with any guesses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import replayed_sdpa
import torch
from attrs import evolve
from engine_parity import PROMPTS, generate
from models.test_qwen3_5_engine import HF as HYBRID
from often import often
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headstock import LLM, SamplingParams
from headstock.errors import CannotRun, EngineDied
from headstock.execution import executor
from headstock.execution.row_tables import DeviceTables
from headstock.nn import drafts
from headstock.spi import Attend, Batch, GraphSupport, Program, Sample
from headstock.spi.arrays import Ints
from headstock_conformance.model.parity import add_tensors, tokens, write
from headstock_sdpa.plugin import spec as sdpa

HF: dict[str, Any] = HYBRID | {"mtp_num_hidden_layers": 1}
FULL_LAYER = 2
"""One with attention, as those have that guess."""
MTP: dict[str, Any] = {"proposer": "mtp"}
Guess = Callable[[Program, Batch, Attend, Tensor, Tensor, Ints], Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    write(folder, HF)
    stored = load_file(folder / "model.safetensors")
    layer, generator = f"model.layers.{FULL_LAYER}.", torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    drawn = {
        name.replace(layer, "mtp.layers.0."): draw(*tensor.shape)
        for name, tensor in stored.items()
        if name.startswith(layer)
    }
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms = {f"mtp.{name}.weight": draw(HF["hidden_size"]) for name in names}
    join = {"mtp.fc.weight": draw(HF["hidden_size"], 2 * HF["hidden_size"])}
    add_tensors(folder, drawn | norms | join)
    return folder


class Reference:
    """The layers by transformers, over whole sequences."""

    def __init__(self, checkpoint: Path) -> None:
        found: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = found.eval()
        stored = load_file(checkpoint / "model.safetensors")
        like = self.model.model.layers[FULL_LAYER]
        self.layer = type(like)(self.model.config, FULL_LAYER).eval()
        self.layer.load_state_dict(
            {
                name.removeprefix("mtp.layers.0."): tensor
                for name, tensor in stored.items()
                if name.startswith("mtp.layers.0.")
            }
        )
        norm = type(self.model.model.norm)
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = norm(HF["hidden_size"], HF["rms_norm_eps"])
            self.norms[name].weight = nn.Parameter(stored[f"mtp.{name}.weight"])
        self.join = stored["mtp.fc.weight"]

    def guess(self, sequence: Sequence[int], count: int) -> list[list[int]]:
        """The guesses behind the sequence, each with those that are as likely within rounding."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([sequence]), use_cache=False).last_hidden_state
            inputs, followers, found = hidden[:, :-1], list(sequence[1:]), list[list[int]]()
            for _ in range(count):
                out = self.run(inputs, followers)
                scores = self.model.lm_head(out[0, -1])
                found.append((scores > scores.max() - 1e-4).nonzero().flatten().tolist())
                followers.append(int(scores.argmax()))
                inputs = torch.cat((inputs, out[:, -1:]), 1)
        return found

    def run(self, hidden: Tensor, followers: Sequence[int]) -> Tensor:
        """What the layer makes of hidden states and the tokens that follow.   [1, tokens, n]"""
        embedded = self.model.model.embed_tokens(torch.tensor([followers]))
        both = (
            self.norms["pre_fc_norm_embedding"](embedded),
            self.norms["pre_fc_norm_hidden"](hidden),
        )
        x = torch.cat(both, -1) @ self.join.mT
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rope = self.model.model.rotary_emb(x, positions.expand(3, 1, length))
        out = self.layer(x, position_embeddings=rope, attention_mask=mask)
        result: Tensor = self.norms["norm"](out[0] if isinstance(out, tuple) else out)
        return result


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of graphs that compute again, which a CPU has."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    with replayed_sdpa.installed(folder):
        yield {"attn": "sdpa-replayed", "runner": replayed_sdpa.RUNNER}


def wrap_guesses(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Guess], Guess]) -> None:
    """Put something around what makes the guesses, in steps with and without graphs."""
    monkeypatch.setattr(drafts, "propose_drafts", wrap(drafts.propose_drafts))


def list_known(program: Program, batch: Batch, last: Tensor) -> list[list[int]]:
    """What is known of each row of the batch behind its step: its tokens and its last sample."""
    table: Tensor = cast("Any", program.row_tables).buffers.tokens
    places = zip(batch.token_rows[last].tolist(), batch.positions[last].tolist(), strict=True)
    return [table[row, : position + 2].tolist() for row, position in places]


@pytest.mark.feature("R11")
@pytest.mark.parametrize(
    ("settings", "is_replayed"),
    often(
        1,
        [
            ({"max_running_requests": 3, "max_batch_tokens": 11}, True),
            ({"max_batch_tokens": 11}, False),
            ({"max_batch_tokens": 40, "overlap": False}, False),
        ],
    ),
    ids=str,
)
def test_guesses_are_those_of_transformers_layers(
    settings: dict[str, Any],
    is_replayed: bool,
    checkpoint: Path,
    reference: Reference,
    replayed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[tuple[int, ...], list[int]] = {}

    def wrap(guess: Guess) -> Guess:
        def watched(
            program: Program,
            batch: Batch,
            attend: Attend,
            hidden: Tensor,
            last: Tensor,
            stops: Ints,
        ) -> Tensor:
            known = list_known(program, batch, last)
            found = guess(program, batch, attend, hidden, last, stops)
            for sequence, guessed in zip(known, found.tolist(), strict=True):
                seen[tuple(sequence)] = guessed
            return found

        return watched

    wrap_guesses(monkeypatch, wrap)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    more = replayed if is_replayed else {}
    # A page for each row: guesses past a row's pages see what the dummy page holds.
    pages = {"page_size": 48, "num_pages": 16, "opt": ["mtp.max_drafts=3"]}
    outputs, engine = generate(checkpoint, prompts=prompts, **pages, **MTP, **more, **settings)

    assert engine.stats().draft_tokens > 40
    answered = {
        tuple(prompt) + tuple(output.token_ids[:count])
        for prompt, output in zip(prompts, outputs, strict=True)
        for count in (1, 4, 7)
    }
    compared = [sequence for sequence in answered if sequence in seen]
    assert len(compared) > 2 * len(prompts)
    for sequence in compared:
        wanted = reference.guess(sequence, 3)
        assert all(draft in likely for draft, likely in zip(seen[sequence], wanted, strict=True)), (
            sequence
        )


WAYS: Sequence[dict[str, Any]] = (
    {"max_batch_tokens": 5, "max_running_requests": 3},
    {"page_size": 2, "num_pages": 40, "max_seq_len": 41, "max_batch_tokens": 11},
    {"overlap": False, "max_running_requests": 2, "opt": ["mtp.max_drafts=4"]},
    {
        "cache_type": "naive",
        "scheduler": "prefill-first",
        "opt": ["mtp.max_drafts=1"],
        # A step of more rows has no room for drafts on a CPU.
        "max_running_requests": 4,
    },
)


@pytest.mark.feature("R11", "G2")
@pytest.mark.parametrize("is_replayed", often(1, [True, False]))
@pytest.mark.parametrize("settings", often(1, WAYS), ids=str)
def test_tokens_are_the_same_however_many_guesses_are_right(
    settings: dict[str, Any],
    is_replayed: bool,
    checkpoint: Path,
    replayed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [*PROMPTS, tokens(30, seed=30)[:20], tokens(30, seed=30)[:25]]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=9, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def answer(**more: Any) -> tuple[list[list[int]], Any]:
        sizes = {"page_size": 4, "num_pages": 128, "max_seq_len": 48, "debug_canary": True}
        with LLM(str(checkpoint), **(sizes | {"attn": "sdpa"} | settings | more)) as llm:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            found = llm.generate(asked, params)
            # Again, behind prefixes that are reused.
            again = llm.generate(asked, params)
            assert [each.outputs[0].token_ids for each in found] == [
                each.outputs[0].token_ids for each in again
            ]
            return [list(each.outputs[0].token_ids) for each in found], llm._session.engine.stats()

    own = {"opt": [each for each in settings.get("opt", []) if not each.startswith("mtp.")]}
    wanted, _ = answer(**own)
    whole = [prompt + tokens for prompt, tokens in zip(prompts, wanted, strict=True)]

    def wrap(guess: Guess) -> Guess:
        def spoiled(
            program: Program,
            batch: Batch,
            attend: Attend,
            hidden: Tensor,
            last: Tensor,
            stops: Ints,
        ) -> Tensor:
            known = list_known(program, batch, last)
            found = guess(program, batch, attend, hidden, last, stops).clone()
            for row, sequence in enumerate(known):
                after = [
                    each[len(sequence) :] for each in whole if each[: len(sequence)] == sequence
                ]
                right = after[0][: found.shape[1]] if after else []
                # Three of four are right, by where they stand.
                for at, token in enumerate(right):
                    found[row, at] = token if (len(sequence) + at) % 4 else (token + 1) % 96
            return found

        return spoiled

    wrap_guesses(monkeypatch, wrap)
    found, stats = answer(**MTP, **(replayed if is_replayed else {}))

    assert found == wanted
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert bool(stats.replayed_verify_steps) == is_replayed


@pytest.mark.parametrize("is_replayed", often(1, [True, False]))
def test_samples_are_on_their_way_before_drafts_are_made(
    is_replayed: bool,
    checkpoint: Path,
    replayed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    of_sample, keep_drafts = executor.Readback.of_sample, DeviceTables.keep_drafts

    def read(sample: Sample, device: torch.device) -> executor.Readback:
        order.append("sample")
        return of_sample(sample, device)

    def keep(tables: DeviceTables, *arguments: Any) -> None:
        order.append("drafts")
        keep_drafts(tables, *arguments)

    settings = replayed | {"defer_graphs": False} if is_replayed else {"attn": "sdpa"}
    with LLM(str(checkpoint), **MTP, **settings) as llm:
        monkeypatch.setattr(executor.Readback, "of_sample", read)
        monkeypatch.setattr(DeviceTables, "keep_drafts", keep)
        llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=6))

    assert len(order) >= 6 and order == ["sample", "drafts"] * (len(order) // 2)


def test_rows_that_began_in_different_steps_run_together(checkpoint: Path) -> None:
    # Two prompts fill a step, so that rows could be planned beside the step of others.
    count, sizes = 12, {"max_batch_tokens": 16, "page_size": 4, "overlap": True}
    prompts = [{"prompt_token_ids": tokens(8, seed=seed)} for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with LLM(str(checkpoint), attn="sdpa", **MTP, **sizes) as llm:
        engine = llm._session.engine
        before = engine.stats().executed_steps
        llm.generate(prompts, params)
        steps = engine.stats().executed_steps - before

    # Three of prompts, the last ones beside rows that decode, and one for each further token.
    assert steps <= 3 + count - 1


def test_a_runner_without_the_drafts_that_it_claims_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sample, "with_drafts", lambda sample, *_: sample)
    with pytest.raises(EngineDied, match="the runner claims drafts and returned none"):
        generate(checkpoint, **MTP)


@pytest.mark.full
def test_two_ranks_make_the_same_guesses(checkpoint: Path) -> None:
    alone, one = generate(checkpoint, **MTP)
    together, two = generate(checkpoint, tp=2, **MTP)

    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert two.stats().accepted_draft_tokens == one.stats().accepted_draft_tokens


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers in config.json is 0"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        (
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "layer_types": ["full_attention"] * 4,
            },
            "its family computes no layers that guess further tokens; set it to ngram or off",
        ),
    ],
)
def test_models_without_such_layers_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | fields), encoding="utf-8")
    with pytest.raises(CannotRun, match=reason):
        LLM(str(tmp_path), load_format="dummy", attn="sdpa", proposer="mtp")


def test_graphs_need_attention_that_is_planned_from_bounds(
    checkpoint: Path, replayed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = evolve(sdpa().capabilities, graph=GraphSupport.DECODE)
    narrow = evolve(replayed_sdpa.spec(), capabilities=claims)
    monkeypatch.setattr(replayed_sdpa, "spec", lambda: narrow)
    with pytest.raises(CannotRun, match="'sdpa-replayed' plans from lengths of the host"):
        LLM(str(checkpoint), **MTP, **replayed)


def test_without_the_proposer_the_layers_are_left_out(checkpoint: Path) -> None:
    _, without = generate(checkpoint)
    _, drafting = generate(checkpoint, **MTP)

    assert "mtp." in " ".join(without.summary.notes)
    assert "mtp." not in " ".join(drafting.summary.notes)
    assert drafting.summary.proposer == "mtp"


def test_the_last_right_token_of_a_row() -> None:
    rows = [[5, 6, 7], [1], [2, 9, 4, 4], [3, 8]]
    after = [[6, 7, 1], [2], [9, 1, 4, 3], [1, 1]]
    wanted = [2, 3, 5, 8]
    lens = np.cumsum([0, *map(len, rows)])
    batch: Any = type("Rows", (), {})()
    batch.tokens, batch.query_start = torch.tensor([*chain(*rows)]), torch.tensor(lens)

    assert drafts.find_last_right(batch, torch.tensor([*chain(*after)])).tolist() == wanted
