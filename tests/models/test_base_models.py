"""Models without their head, as embedding models are published: vectors, and text where it can be.

A base model of transformers has a name of its own, and its tensors have shorter names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parity import SMALL
from families import FAMILIES
from family_cases import CASES
from often import often
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock.doctor import check_parts
from headstock.errors import CannotRun, HeadstockError, RequestError
from headstock.registry import unknown_architecture_error
from headstock.spi import Params
from headstock.startup.model_loading import read_model, replace_missing_head, untie_embeddings
from headstock.weights import load_weights
from headstock_conformance.model.parity import (
    ARCHITECTURES,
    add_tensors,
    assert_parity,
    shape,
    tokens,
    write,
)

PROMPT = tokens(20)
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TYPES = sorted({*ARCHITECTURES, *FAMILIES})


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model of that family, with settings that are not neutral."""
    cases = [case for case in CASES if case.model_type == model_type]
    return {**(cases[0].hf if cases else shape(model_type)), **changes}


def edit(directory: Path, changes: Mapping[str, Any], *, bare: bool, without: str = "") -> None:
    """Change config.json, and the names of the tensors to those of a base model.

    without: the one that is left out
    """
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    file = directory / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name != without}
    if bare:
        kept = {name.removeprefix("model."): tensor for name, tensor in kept.items()}
    save_file(kept, file, metadata={"format": "pt"})


def load(directory: Path) -> tuple[Params, str]:
    """The parameters, and why there is no text."""
    family, config = read_model(directory)
    config = untie_embeddings(directory, family, config)
    config, no_text = replace_missing_head(directory, family, config)
    settings: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "max_seq_len": 20}
    return load_weights(directory, family.params(config), config, **settings), no_text


def vector(directory: Path) -> torch.Tensor:
    """What transformers makes of the prompt's last token, after the last norm."""
    model = AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        state: torch.Tensor = model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    return state


def embed(llm: LLM) -> torch.Tensor:
    """The same from headstock."""
    (output,) = llm.embed({"prompt_token_ids": PROMPT}, normalize=False)
    return torch.tensor(output.outputs.embedding)


@pytest.mark.parametrize("model_type", often(8, reversed(TYPES)))
def test_a_base_model_of_every_family_has_the_same_parameters(
    model_type: str, tmp_path: Path
) -> None:
    write(tmp_path, small(model_type))
    whole, _ = load(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    name = AutoModel.from_config(config).__class__.__name__
    assert name.endswith("Model")

    edit(tmp_path, {"architectures": [name]}, bare=True, without=HEAD)
    params, no_text = load(tmp_path)

    assert (no_text == "") == ("lm_head" not in whole)
    assert params.keys() == whole.keys() - {"lm_head"}
    assert all(torch.equal(params[each].tensor, whole[each].tensor) for each in params)


@pytest.mark.parametrize(
    ("model_type", "architecture", "bare"),
    [
        ("qwen3", "Qwen3ForCausalLM", True),
        ("qwen3", "Qwen3Model", False),
        ("mistral", "MistralModel", True),
        ("llama", "LlamaModel", True),
    ],
)
def test_a_model_without_a_head_gives_vectors_and_refuses_text(
    model_type: str, architecture: str, bare: bool, tmp_path: Path
) -> None:
    write(tmp_path, small(model_type, tie_word_embeddings=False))
    edit(tmp_path, {"architectures": [architecture]}, bare=bare, without=HEAD)
    with LLM(str(tmp_path), **SMALL) as llm:
        torch.testing.assert_close(embed(llm), vector(tmp_path), atol=1e-4, rtol=0)
        for params in (SamplingParams(max_tokens=1), SamplingParams(prompt_logprobs=1)):
            with pytest.raises(RequestError, match=r"gives no text: .*lm_head\.weight.*LLM\.embed"):
                llm.generate({"prompt_token_ids": PROMPT}, params)
        # The refusal leaves the engine as it was.
        torch.testing.assert_close(embed(llm), vector(tmp_path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", [EMBED, HEAD], ids=["embeddings", "output matrix"])
@pytest.mark.parametrize("bare", [True, False])
def test_tied_embeddings_make_a_head(stored: str, bare: bool, tmp_path: Path) -> None:
    write(tmp_path, small("qwen3", tie_word_embeddings=True))
    expected_vector = vector(tmp_path)
    with LLM(str(tmp_path), **SMALL) as llm:
        prompt = {"prompt_token_ids": PROMPT}
        answer = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0.0))
    if stored == HEAD:
        embeddings = load_file(tmp_path / "model.safetensors")[EMBED]
        add_tensors(tmp_path, {HEAD: embeddings})
    edit(tmp_path, {}, bare=bare, without=HEAD if stored == EMBED else EMBED)

    with LLM(str(tmp_path), **SMALL) as llm:
        again = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0.0))
        torch.testing.assert_close(embed(llm), expected_vector, atol=1e-4, rtol=0)
    assert again[0].outputs[0].token_ids == answer[0].outputs[0].token_ids


def test_an_output_matrix_for_tied_embeddings_is_read_as_transformers_does(tmp_path: Path) -> None:
    write(tmp_path, small("llama", tie_word_embeddings=True))
    add_tensors(tmp_path, {HEAD: load_file(tmp_path / "model.safetensors")[EMBED]})
    edit(tmp_path, {}, bare=False, without=EMBED)

    assert_parity(tmp_path, PROMPT)


def test_a_head_of_its_own_beside_the_name_of_a_base_model_is_used(tmp_path: Path) -> None:
    write(tmp_path, small("qwen3", tie_word_embeddings=False))
    whole, _ = load(tmp_path)
    edit(tmp_path, {"architectures": ["Qwen3Model"]}, bare=True)

    params, no_text = load(tmp_path)

    assert no_text == ""
    assert torch.equal(params["lm_head"].tensor, whole["lm_head"].tensor)


def test_the_doctor_says_that_there_is_no_text(tmp_path: Path) -> None:
    write(tmp_path, small("qwen3", tie_word_embeddings=False))
    edit(tmp_path, {"architectures": ["Qwen3Model"]}, bare=True, without=HEAD)

    findings = [
        finding
        for finding in check_parts(EngineConfig(model=str(tmp_path), attn="sdpa"))
        if finding.subject == "weights"
    ]

    assert "no text" in findings[0].text
    assert "tensors in 1 file" in findings[1].text


@pytest.mark.parametrize("name", ["Gemma3Model", "Qwen3VLModel", "Model", "BertModel"])
def test_other_base_models_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, small("qwen3"))
    edit(tmp_path, {"architectures": [name], "model_type": "other"}, bare=False)

    with pytest.raises(
        HeadstockError, match=r"no installed model family serves|model_type: expected"
    ):
        read_model(tmp_path)


def test_a_family_that_is_not_installed_is_named_for_its_base_model() -> None:
    error = unknown_architecture_error("Gemma3TextModel")
    assert isinstance(error, CannotRun)
    assert "install it with: pip install ./models/gemma" in str(error)
    # Beside images, Phi3Model would be another model than Phi3ForCausalLM.
    other = unknown_architecture_error("Phi3Model", inputs=["images"])
    assert "install it with" not in str(other)


def test_a_base_model_beside_images_is_not_that_of_a_text_family(tmp_path: Path) -> None:
    write(tmp_path, small("gemma3_text"))
    edit(tmp_path, {"architectures": ["Gemma3TextModel"], "vision_config": {}}, bare=False)

    with pytest.raises(CannotRun, match=r"Gemma3TextModel.*images"):
        read_model(tmp_path)
