"""How vectors are made where a request does not say: the checkpoint's own files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstock import LLM, registry
from headstock.errors import ModelError, RequestError
from headstock.text.embedding_config import EmbeddingConfig, read_embedding_config
from headstock.text.prompt import instruct_prompt

QUERY = "Instruct: find what answers the query\nQuery:"


def write(directory: Path, pooling: dict[str, Any], *more: str, prompts: object = None) -> Path:
    """Files as sentence-transformers writes them."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", "1_Pooling", *(f"{index}_{kind}" for index, kind in enumerate(more, start=2))]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if prompts is not None:
        named = {"prompts": prompts, "default_prompt_name": None}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(named))
    return directory


def find_demo() -> Path:
    """The directory of the demo model."""
    return Path(registry.load_spec("checkpoint", "demo").directory)


LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


def test_a_checkpoint_without_files_has_last_tokens_of_length_1(tmp_path: Path) -> None:
    assert read_embedding_config(tmp_path) == EmbeddingConfig(pooling="last", normalize=True)


@pytest.mark.parametrize(
    ("pooling", "more", "kind", "normalize"),
    [
        (LAST, ("Normalize",), "last", True),
        (LAST, (), "last", False),
        (MEAN, ("Normalize",), "mean", True),
        ({"pooling_mode": "lasttoken"}, (), "last", False),
        ({"pooling_mode": ["mean"]}, (), "mean", False),
    ],
)
def test_pooling_and_length_are_those_of_the_files(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], kind: str, normalize: bool
) -> None:
    config = read_embedding_config(write(tmp_path, pooling, *more))

    assert (config.find_pooling(None), config.normalize) == (kind, normalize)
    assert config.find_pooling("mean") == "mean"


@pytest.mark.parametrize(
    ("pooling", "more", "names"),
    [
        ({"pooling_mode_cls_token": True}, (), "cls"),
        (MEAN | {"pooling_mode_max_tokens": True}, (), "mean and max"),
        ({}, (), "nothing"),
        (LAST, ("Dense",), "Dense"),
        (MEAN | {"include_prompt": False}, (), "without its instruction"),
    ],
)
def test_what_is_not_served_is_refused_unless_a_request_says_how(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], names: str
) -> None:
    config = read_embedding_config(write(tmp_path, pooling, *more))

    with pytest.raises(RequestError, match=names) as raised:
        config.find_pooling(None)
    assert raised.value.parameter == "pooling"
    assert config.find_pooling("last") == "last"


def test_instructions_have_names(tmp_path: Path) -> None:
    prompts = {"query": QUERY, "document": ""}
    config = read_embedding_config(write(tmp_path, LAST, prompts=prompts))

    assert config.find_instruction("query") == QUERY
    assert config.find_instruction("document") == config.find_instruction(None) == ""
    with pytest.raises(RequestError, match="expected one of query, document, got quest"):
        config.find_instruction("quest")


def test_texts_are_bounded_and_small_letters_where_the_files_say_so(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(find_demo(), tmp_path / "model"))
    file = directory / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 4, "do_lower_case": True}))
    with LLM(str(directory), max_seq_len=64, num_pages=64) as llm:
        loud, small = llm.embed(["THE", "the"])
        assert loud.prompt_token_ids == small.prompt_token_ids
        with pytest.raises(RequestError, match="prompt has 5 tokens, and max_seq_length of sent"):
            llm.embed([{"prompt_token_ids": [5, 6, 7, 8, 9]}])
        llm.embed([{"prompt_token_ids": [5, 6, 7, 8]}])


def test_an_instruction_comes_before_a_text_and_ids_stay() -> None:
    assert instruct_prompt("a", "b: ", None) == "b: a"
    salted: Any = {"prompt": "a", "cache_salt": "s"}
    assert instruct_prompt(salted, "b: ", "query") == {"prompt": "b: a", "cache_salt": "s"}
    assert instruct_prompt([1, 2], "b: ", None) == [1, 2]
    with pytest.raises(RequestError, match="expected a prompt as text, got token ids"):
        instruct_prompt([1, 2], "b: ", "query")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modules.json", "{}"),
        ("modules.json", "["),
        ("sentence_bert_config.json", '{"max_seq_length": 0}'),
        ("sentence_bert_config.json", '{"do_lower_case": "no"}'),
        ("config_sentence_transformers.json", "[]"),
        ("config_sentence_transformers.json", '{"prompts": ["query"]}'),
        ("config_sentence_transformers.json", '{"prompts": {"query": 3}}'),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ModelError, match=name):
        read_embedding_config(tmp_path)


@pytest.mark.feature("W6")
def test_vectors_follow_the_files_and_requests_follow_what_they_say(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(find_demo(), directory)
    write(directory, MEAN, prompts={"query": QUERY})
    with LLM(str(directory), device="cpu", num_pages=32, max_seq_len=256) as llm:

        def embed(text: str, **more: Any) -> list[float]:
            (output,) = llm.embed([text], **more)
            vector: list[float] = output.outputs.embedding
            return vector

        plain = embed("Once upon a time")
        asked = embed("Once upon a time", pooling="last", normalize=True)
        named = embed("Once upon a time", prompt_name="query")
        with pytest.raises(RequestError, match="expected one of query, got passage"):
            embed("Once", prompt_name="passage")

        assert plain == pytest.approx(
            embed("Once upon a time", pooling="mean", normalize=False), abs=1e-5
        )
        assert math.hypot(*plain) > 1.5
        assert math.hypot(*asked) == pytest.approx(1.0, abs=1e-5)
        assert named == pytest.approx(embed(QUERY + "Once upon a time"), abs=1e-5)
        assert named != pytest.approx(plain, abs=1e-3)
