"""Decoders that transformers computes, over headstock's pages, beside transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from decoder_cases import REFUSED, SERVED, make_config
from engine_parity import MAX_TOKENS, PROMPTS, SMALL, answer_alone, assert_equal
from often import often
from torch import nn
from transformers import AttentionInterface, AutoModel

from headstock import LLM, SamplingParams
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.errors import CannotRun, ModelError
from headstock.nn.meta_batch import make_meta_batch
from headstock.selection.model_needs import find_attention_needs
from headstock.selection.select import select_plugins
from headstock.spi import DeviceEnv, Shard, Weight
from headstock.startup.family_names import choose_family_name
from headstock.startup.model_loading import read_family, shard_model
from headstock_conformance.model.parity import write
from headstock_transformers.attention import LOCAL
from headstock_transformers.family import make_family
from headstock_transformers.module import build_decoder
from headstock_transformers.options import TransformersOptions
from headstock_transformers.probe import probe_decoder

CHUNKS = {"max_batch_tokens": 7, "max_running_requests": 5}
FOUND = {"model_impl": "transformers"}
HOPPER = DeviceEnv(device="cuda", capability=(9, 0), distributions={"vllm": "0.24.0"})


def write_case(directory: Path, model_type: str, **changes: Any) -> dict[str, Any]:
    """A random checkpoint of that type, named as published ones are; returns its config.json."""
    settings = SERVED[model_type] if model_type in SERVED else REFUSED[model_type][0]
    hf = make_config(model_type, settings, **changes)
    write(directory, hf)
    return hf


@pytest.mark.parametrize("model_type", often(2, SERVED))
def test_tokens_are_those_of_transformers_in_chunks_and_after_prefix_hits(
    model_type: str, tmp_path: Path
) -> None:
    write_case(tmp_path, model_type)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    with LLM(str(tmp_path), debug_invariants=True, **(SMALL | CHUNKS | FOUND)) as llm:
        rounds = [llm.generate(prompts, params) for _ in range(2)]

    answers = answer_alone(tmp_path)
    for outputs in rounds:
        for number, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
            assert len(output.outputs[0].token_ids) == MAX_TOKENS
            assert_equal(output.outputs[0], answer, number)
    assert (rounds[1][-1].num_cached_tokens or 0) >= 28


def test_preempted_rows_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    write_case(tmp_path, "helium")
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    with LLM(str(tmp_path), **(SMALL | CHUNKS | FOUND | {"num_pages": 12})) as llm:
        # On a busy machine a request may end before the next one comes, and leave it room.
        for _ in range(50):
            outputs = llm.generate(prompts, params)
            if llm._session.engine.stats().preemptions > 0:
                break
        assert llm._session.engine.stats().preemptions > 0

    for number, answer in enumerate(answer_alone(tmp_path)):
        assert_equal(outputs[number].outputs[0], answer, number)


@pytest.mark.parametrize("model_type", often(5, REFUSED))
def test_what_would_be_wrong_in_silence_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[model_type]
    hf = make_config(model_type, settings)
    with pytest.raises(ValueError, match=reason) as caught:
        make_family(TransformersOptions()).config(hf)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_window_is_read_from_masks_far_beyond_the_first_tokens() -> None:
    hf = make_config("phimoe", {"sliding_window": 5000}, max_position_embeddings=20000)
    config = make_family(TransformersOptions()).config(hf)
    assert [layer.window for layer in config.layers] == [5000] * 4

    config = make_family(TransformersOptions()).config(hf | {"sliding_window": 20000})
    assert [layer.window for layer in config.layers] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["HeliumForSequenceClassification"]}, "computed as HeliumForCausalLM"),
        ({"model_type": "nothing"}, "it has no model_type nothing"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
    ],
)
def test_fields_that_cannot_be_served_are_refused_in_one_line(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make_family(TransformersOptions()).config(make_config("helium", {}) | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "eos_token_id", "max_position_embeddings"])
def test_fields_that_transformers_refuses_are_the_fault_of_the_configuration(
    name: str, tmp_path: Path
) -> None:
    hf = make_config("helium", {}) | {name: "wide"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    reason = rf"config.json in .*: transformers refuses .*{name}.*; correct it, or choose"
    for implementation in ("auto", "transformers"):
        with pytest.raises(ModelError, match=reason) as caught:
            read_family(tmp_path, implementation=implementation)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("modernbert-decoder", {None, 6}),
        ("hunyuan_v1_moe", {None}),
        ("granitemoehybrid", {None}),
    ],
)
def test_settings_that_only_look_as_if_they_could_not_be_served_are_served(
    model_type: str, windows: set[int | None]
) -> None:
    family = make_family(TransformersOptions())
    config = family.config(make_config(model_type, SERVED[model_type]))
    assert {layer.window for layer in config.layers} == windows


def test_the_published_spelling_of_a_name_is_that_of_its_class() -> None:
    hf = make_config("phimoe", {}) | {"architectures": ["PhiMoEForCausalLM"]}
    assert make_family(TransformersOptions()).config(hf).architecture == "PhimoeForCausalLM"


def test_positions_begin_where_the_embeddings_begin_them() -> None:
    hf = make_config("roberta", SERVED["roberta"])
    assert build_decoder(hf).first_position == hf["pad_token_id"] + 1
    config = make_family(TransformersOptions()).config(hf)
    assert config.max_position == hf["max_position_embeddings"] - hf["pad_token_id"] - 1


def test_an_argument_of_attention_that_no_backend_gets_is_refused() -> None:
    decoder = build_decoder(make_config("helium", {}))

    def add(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"unheard_of": 1}

    attention = decoder.base.get_submodule("layers.2.self_attn")
    attention.register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match="layer 2: attention gets unheard_of"):
        probe_decoder(decoder)


def test_a_family_comes_first_and_native_keeps_transformers_out(tmp_path: Path) -> None:
    write_case(tmp_path, "qwen3", num_hidden_layers=1)
    assert read_family(tmp_path).spec.name == "Qwen3ForCausalLM"
    assert read_family(tmp_path, implementation="transformers").spec.name == "transformers"

    write_case(tmp_path, "helium", num_hidden_layers=1)
    assert read_family(tmp_path).spec.name == "transformers"
    with pytest.raises(CannotRun, match=r"no installed model family serves .* Helium"):
        read_family(tmp_path, implementation="native")


def test_a_refusal_says_why_neither_a_family_nor_transformers_serves(tmp_path: Path) -> None:
    write_case(tmp_path, "stablelm")
    with pytest.raises(CannotRun, match=r"nor does transformers: StableLm.* attention interface"):
        read_family(tmp_path)
    with pytest.raises(CannotRun, match=r"\(--model-impl\) transformers: StableLm.*set it to auto"):
        read_family(tmp_path, implementation="transformers")


def test_a_model_of_images_whose_text_a_family_serves_needs_that_family() -> None:
    reason = r"Gemma3ForCond\w+ takes images beside text, .* set it to auto"
    with pytest.raises(CannotRun, match=reason):
        choose_family_name("Gemma3ForConditionalGeneration", ["images"], "transformers")


def test_one_line_says_who_computes_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_case(tmp_path, "helium", num_hidden_layers=1)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    run = ["run", "--model", str(tmp_path), "--input", str(lines), "--max-tokens", "2"]
    settings = ["--attn", "sdpa", "--num-pages", "32", "--ignore-eos"]
    assert main([*run, *settings]) == 0
    assert "since no family serves it: on one device" in " ".join(capsys.readouterr().err.split())
    assert main([*run, *settings, "--model-impl", "transformers"]) == 0
    assert "as model_impl (--model-impl) says" in " ".join(capsys.readouterr().err.split())
    assert main([*run, *settings, "--model-impl", "native"]) == 5


def test_vectors_are_hidden_states_of_transformers(tmp_path: Path) -> None:
    write_case(tmp_path, "helium")
    with LLM(str(tmp_path), **(SMALL | CHUNKS)) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS[3:]], normalize=False)
    model = AutoModel.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for ids, output in zip(PROMPTS[3:], outputs, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert torch.allclose(torch.tensor(output.outputs.embedding), wanted, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "helium"])
def test_heads_of_a_token_lie_together_as_backends_read_them(model_type: str) -> None:
    family = make_family(TransformersOptions())
    config = family.config(make_config(model_type, {}))
    params = {
        name: Weight(tensor=torch.zeros(spec.shape, device="meta"))
        for name, spec in family.params(config).items()
    }
    strides = []

    def attend(q: torch.Tensor, layer: int) -> torch.Tensor:
        strides.append(q.stride()[1:])
        return torch.empty_like(q)

    ops: Any = None
    with torch.inference_mode():
        hidden = family.forward(params, config, make_meta_batch(config, 8), attend, ops)
    assert hidden.shape == (8, config.hidden)
    assert strides == [(config.head_dim, 1)] * len(config.layers)


def test_tokens_that_meet_outside_attention_and_other_positions_are_found(tmp_path: Path) -> None:
    hf = make_config("helium", {})
    family = make_family(TransformersOptions())
    config = family.config(hf)
    torch.manual_seed(0)
    params = {
        name: Weight(
            tensor=spec.compute(config, 64) if spec.compute else torch.randn(spec.shape) * 0.3
        )
        for name, spec in family.params(config).items()
    }
    assert family.check is not None
    family.check(params, config)
    base = family.forward.__self__.decoder.base

    def renumber(module: nn.Module, args: Any, kwargs: Any) -> Any:
        made = torch.arange(2, kwargs["input_ids"].shape[1] + 2)[None]
        return args, kwargs if kwargs["position_ids"] is not None else {
            **kwargs,
            "position_ids": made,
        }

    hook = base.register_forward_pre_hook(renumber, with_kwargs=True)
    with pytest.raises(ValueError, match="numbers the tokens of a text otherwise"):
        family.check(params, config)
    hook.remove()

    def mix(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * output.roll(1, 1)

    base.get_submodule("layers.0.mlp").register_forward_hook(mix)
    with pytest.raises(ValueError, match="outside attention"):
        family.check(params, config)


def test_parts_for_several_devices_are_refused(tmp_path: Path) -> None:
    write_case(tmp_path, "helium", num_hidden_layers=1)
    read = read_family(tmp_path)
    with pytest.raises(CannotRun, match="HeliumForCausalLM cannot be cut into shards"):
        shard_model(read.family, read.config, Shard(index=0, count=2))


@pytest.mark.parametrize(("experts", "runner"), [("auto", "cudagraph"), ("eager", "eager")])
def test_auto_replays_what_can_be_captured(experts: str, runner: str, tmp_path: Path) -> None:
    write_case(tmp_path, "kolibri1", num_hidden_layers=1)
    model = read_family(tmp_path, opt=(f"transformers.experts={experts}",)).config
    assert model.is_capturable == (runner == "cudagraph")
    config = EngineConfig(attn="fa", ops="torch", page_size=16)
    needs = find_attention_needs(config, model, "bfloat16", 64)
    assert select_plugins(config, HOPPER, needs).runner.name == runner


def test_auto_runs_without_graphs_and_a_runner_with_them_is_refused(tmp_path: Path) -> None:
    write_case(tmp_path, "phimoe", num_hidden_layers=1)
    model = read_family(tmp_path).config
    env = DeviceEnv(device="cuda", capability=(9, 0))
    config = EngineConfig(attn="sdpa", ops="torch", page_size=16)
    needs = find_attention_needs(config, model, "float16", 64)
    assert select_plugins(config, env, needs).runner.name == "eager"
    reason = "PhimoeForCausalLM cannot be captured: model.rotary_emb .*; set the runner to"
    with pytest.raises(CannotRun, match=reason):
        select_plugins(attrs.evolve(config, runner="cudagraph"), env, needs)


def test_a_model_that_its_family_finds_wrong_is_refused_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_case(tmp_path, "helium", num_hidden_layers=1)

    def shift(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return query.transpose(1, 2).roll(1, 1).contiguous(), None

    monkeypatch.setitem(AttentionInterface._global_mapping, LOCAL, shift)
    with pytest.raises(CannotRun, match="'transformers': in HeliumForCausalLM a token's result"):
        LLM(str(tmp_path), **SMALL)


def test_an_option_chooses_how_experts_are_multiplied(tmp_path: Path) -> None:
    write_case(tmp_path, "mixtral", num_hidden_layers=1)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    tokens = []
    for kind in ("eager", "batched_mm"):
        settings = SMALL | FOUND | {"opt": (f"transformers.experts={kind}",)}
        with LLM(str(tmp_path), **settings) as llm:
            output = llm.generate([{"prompt_token_ids": PROMPTS[4]}], params)[0].outputs[0]
        tokens.append(list(output.token_ids))
    assert tokens[0] == tokens[1]
