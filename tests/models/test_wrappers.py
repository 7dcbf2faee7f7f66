"""The text of models that take images too: the log-probabilities of transformers, towers unread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parity import MAX_TOKENS, answer_alone, assert_equal, generate
from often import often
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
from wrappers import CASES, TEXT, Wrapped

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock.doctor import check_parts
from headstock.engine.engine import Engine
from headstock.errors import ModelError, RequestError
from headstock.startup.model_loading import read_model
from headstock_conformance.model.parity import add_tensors, computed, expected, tokens, write

PROMPT = [token % 89 for token in tokens(40)]
"""Without the token that stands for an image."""
FIRST = {case.model_type: case for case in reversed(CASES)}
BY_FIRST = sorted(CASES, key=lambda case: case not in FIRST.values())
"""The first case of each model, and then the others."""
TIED = {"gemma3", "gemma4", "gemma4_unified", "mistral3", "internvl"}
OTHER_NAMES = {name for name in FIRST if name in ("idefics3", "smolvlm")}
"""Models whose decoder has had the same name in every release, and another one than most."""
SPARSE = {
    (case.model_type, case.text_type): case
    for case in CASES
    if case.text_type in ("llama", "mistral", "qwen2", "qwen3") and case.model_type != "mistral3"
}.values()
"""One case of each decoder whose files omit what transformers has by default."""
SMALL = {"attn": "sdpa", "page_size": 4, "num_pages": 64, "max_seq_len": 48}


def rename(directory: Path, change: Callable[[str], str]) -> None:
    """Change the names of the tensors."""
    file = directory / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def to_current(name: str) -> str:
    """The name as transformers holds the tensor today."""
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model.language_model."),
        ("model.visual.", "model.visual."),
        ("lm_head.", "lm_head."),
        ("model.", "model.language_model."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return f"model.{name}"


def to_older(name: str) -> str:
    """The name as transformers held the tensor before 4.52."""
    name = to_current(name)
    for new, old in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


@pytest.mark.parametrize("case", often(len(FIRST), BY_FIRST), ids=str)
def test_log_probabilities_are_those_of_transformers(case: Wrapped, tmp_path: Path) -> None:
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)

    for chunk in (None, 7):
        ours = computed(tmp_path, PROMPT, chunk)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert read_model(tmp_path)[1].ignored_fields == ()


@pytest.mark.parametrize("model_type", often(8, sorted(FIRST.keys() - OTHER_NAMES)))
def test_names_of_any_release_are_read_alike(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, FIRST[model_type].hf)
    before = computed(tmp_path, PROMPT)

    for change in (to_current, to_older):
        rename(tmp_path, change)
        assert torch.equal(computed(tmp_path, PROMPT), before)


@pytest.mark.parametrize("model_type", often(3, FIRST))
def test_what_transformers_saves_again_is_read_alike(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, FIRST[model_type].hf)
    before = computed(tmp_path, PROMPT)
    again = tmp_path / "again"
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    model.save_pretrained(again, max_shard_size="30KB", save_original_format=False)

    assert len(list(again.glob("*.safetensors"))) > 1
    torch.testing.assert_close(computed(again, PROMPT), before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", sorted(TIED))
def test_the_whole_ties_its_matrices_by_default(model_type: str, tmp_path: Path) -> None:
    hf = {name: value for name, value in FIRST[model_type].hf.items() if "tie" not in name}
    write(tmp_path, hf)
    assert read_model(tmp_path)[1].tied_embeddings

    # Published files of these say nothing, and store a matrix of its own.
    # Those of Gemma-4 are younger than the name that others have it by.
    base = "" if model_type.startswith("gemma4") else "language_model."
    add_tensors(tmp_path, {f"{base}lm_head.weight": torch.randn(96, 32)})
    torch.testing.assert_close(
        computed(tmp_path, PROMPT), expected(tmp_path, PROMPT), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("model_type", sorted(FIRST.keys() - TIED))
def test_other_wholes_do_not_tie_theirs_by_default(model_type: str, tmp_path: Path) -> None:
    hf = {name: value for name, value in FIRST[model_type].hf.items() if "tie" not in name}
    (tmp_path / "config.json").write_text(json.dumps(hf))

    assert not read_model(tmp_path)[1].tied_embeddings


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_what_the_table_of_a_decoder_omits_is_as_in_transformers(
    case: Wrapped, tmp_path: Path
) -> None:
    hf = {
        "architectures": [case.architecture],
        "model_type": case.model_type,
        "text_config": {"model_type": case.text_type},
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    ours = read_model(tmp_path)[1]
    for name, value in {
        "vocab_size": ours.vocab,
        "hidden_size": ours.hidden,
        "num_hidden_layers": len(ours.layers),
        "num_attention_heads": ours.heads,
        "num_key_value_heads": ours.kv_heads,
        "max_position_embeddings": ours.max_position,
        "rms_norm_eps": ours.norm_eps,
    }.items():
        assert value == getattr(theirs, name), name
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == width


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_fields_of_the_decoder_beside_those_of_the_tower(model_type: str, tmp_path: Path) -> None:
    nested = FIRST[model_type].hf
    flat = {**nested.pop("text_config"), **nested, "tie_word_embeddings": True}
    write(tmp_path, flat)

    torch.testing.assert_close(
        computed(tmp_path, PROMPT), expected(tmp_path, PROMPT), atol=1e-4, rtol=0
    )
    _, config = read_model(tmp_path)
    assert config.ignored_fields == ()
    assert config.tied_embeddings


@pytest.mark.parametrize("model_type", often(1, ["qwen3_vl_moe", "gemma3"]))
def test_tokens_through_the_engine_are_those_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    # None of the prompts has this token.
    write(tmp_path, {**FIRST[model_type].hf, "image_token_id": 99, "image_token_index": 99})
    outputs, _ = generate(tmp_path, max_batch_tokens=11, max_running_requests=7)
    for number, (output, answer) in enumerate(
        zip(outputs, answer_alone(tmp_path, AutoModelForImageTextToText), strict=True)
    ):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)


def test_one_line_says_that_the_tower_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, FIRST["gemma3"].hf)
    names = list(load_file(tmp_path / "model.safetensors"))
    count = sum(not name.startswith("language_model.") for name in names)
    assert 0 < count < len(names)

    engine = Engine(EngineConfig(model=str(tmp_path), num_pages=8, page_size=16, max_seq_len=32))
    assert [note for note in engine.summary.notes if "text alone" in note] == [
        f"text alone; {count} tensors of the vision tower are not read"
    ]
    engine.close()


def test_a_model_without_its_head_gives_vectors(tmp_path: Path) -> None:
    hf = FIRST["qwen3_vl"].hf
    write(tmp_path, hf)
    rename(tmp_path, lambda name: to_current(name).removeprefix("model."))
    (tmp_path / "config.json").write_text(json.dumps({**hf, "architectures": ["Qwen3VLModel"]}))
    kept = load_file(tmp_path / "model.safetensors")
    del kept["lm_head.weight"]
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0, -1]

    with LLM(str(tmp_path), **SMALL) as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPT}, normalize=False)
        assert any("no text" in note for note in llm._session.engine.summary.notes)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), state, atol=1e-4, rtol=0)


def test_the_doctor_takes_the_tower_as_part_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, FIRST["qwen3_vl"].hf)

    findings = check_parts(EngineConfig(model=str(tmp_path), attn="sdpa"))

    assert any("tensors in 1 file" in each.text for each in findings if each.subject == "weights")


def test_a_tensor_that_is_of_no_known_part_is_refused(tmp_path: Path) -> None:
    write(tmp_path, FIRST["qwen3_vl"].hf)
    add_tensors(tmp_path, {"model.language_model.layers.0.gate.weight": torch.ones(1)})

    with pytest.raises(ModelError, match=r"unexpected model\.language_model\.layers\.0\.gate"):
        computed(tmp_path, PROMPT)


def test_layers_that_predict_further_tokens_are_left_out_under_any_name(tmp_path: Path) -> None:
    write(tmp_path, FIRST["glm4v_moe"].hf)
    before = computed(tmp_path, PROMPT)
    add_tensors(tmp_path, {"model.language_model.layers.3.eh_proj.weight": torch.ones(3, 5)})

    assert torch.equal(computed(tmp_path, PROMPT), before)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FIRST["qwen2_vl"].hf)
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    add_tensors(tmp_path, {"model.language_model.norm.weight": norm})

    with pytest.raises(ModelError, match="two names of one tensor; remove the one"):
        computed(tmp_path, PROMPT)


@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_prompt_with_the_token_of_an_image_is_refused(is_embedding: bool, tmp_path: Path) -> None:
    write(tmp_path, FIRST["qwen3_vl"].hf)
    with LLM(str(tmp_path), **SMALL) as llm:
        good = {"prompt_token_ids": PROMPT}
        bad = {"prompt_token_ids": [*PROMPT[:5], 90, *PROMPT[5:]]}
        params = SamplingParams(max_tokens=2, temperature=0.0)
        before = llm.generate(good, params)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="has token 90, which stands for an image"):
            llm.embed(bad) if is_embedding else llm.generate([good, bad], params)
        # The refusal leaves the engine as it was.
        assert llm.generate(good, params)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("model_type", "changes", "found"),
    [
        ("qwen3_vl", {}, ((90, "an image"), (151656, "a video"))),
        ("qwen3_vl", {"image_token_id": None}, ((151655, "an image"), (151656, "a video"))),
        ("qwen2_vl", {"video_token_id": 91}, ((90, "an image"), (91, "a video"))),
        ("gemma3", {"image_token_id": None, "image_token_index": 93}, ((93, "an image"),)),
        ("mistral3", {"image_token_id": None}, ((10, "an image"),)),
        ("llava", {"image_token_index": None}, ((32000, "an image"),)),
        (
            "llava_onevision",
            {"image_token_index": 91, "video_token_index": 92},
            ((91, "an image"), (92, "a video")),
        ),
        ("gemma4", {}, ((90, "an image"), (258884, "a video"), (258881, "sound"))),
    ],
    ids=str,
)
def test_tokens_that_stand_for_other_inputs(
    model_type: str, changes: dict[str, Any], found: tuple[tuple[int, str], ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIRST[model_type].hf, **changes}))

    assert read_model(tmp_path)[1].placeholders == found


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma3", {"text_config": None}, "text_config: expected a table .* got null"),
        ("gemma3", {"text_config": "gemma"}, "text_config: expected a table .* got 'gemma'"),
        ("mistral3", {"text_config": {**TEXT, "model_type": "qwen2"}}, "model_type: .* 'qwen2'"),
        ("mistral3", {"text_config": {**TEXT, "model_type": ["x"]}}, "model_type: expected"),
        (
            "llava",
            {"text_config": {**TEXT, "model_type": "qwen2"}},
            "expected llama or mistral in LlavaForConditionalGeneration, got 'qwen2'",
        ),
        (
            "gemma4",
            {"text_config": {**TEXT, "num_kv_shared_layers": 2}},
            r"text_config\.hidden_size_per_layer_input: expected 0, got 256; .*E2B, E4B",
        ),
        ("gemma3", {"text_config": {"hidden_size": 0}}, r"text_config\.hidden_size: .* got 0"),
        (
            "gemma3",
            {"text_config": {**TEXT, "final_logit_softcapping": 3.0}},
            r"text_config\.final_logit_softcapping: expected null beside images, got 3\.0",
        ),
        ("qwen3_vl", {"image_token_id": "x"}, "image_token_id: expected a whole .* got 'x'"),
        ("qwen3_vl", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or .* got 1"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    model_type: str, changes: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIRST[model_type].hf, **changes}))

    with pytest.raises(ModelError, match=f"^[^\n]*{message}[^\n]*$"):
        read_model(tmp_path)
