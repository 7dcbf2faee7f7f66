"""The tokenizer of a GGUF file makes the ids that the model was trained with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf_files import describe_tokenizer, make_file, write_gguf
from source_tree import ROOT
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

import headstock_demo.checkpoint
from headstock import LLM
from headstock.errors import ModelError
from headstock.text.tokenizer import NoTokenizer, Tokenizer, open_tokenizer
from headstock.weights import resolve_directory
from headstock.weights.gguf.header import read_gguf_header
from headstock.weights.gguf.metadata import Metadata
from headstock.weights.gguf.tokenizer import translate_tokenizer
from headstock_conformance.model.parity import shape, write

TEXTS = (
    "",
    "A file of 12345 bytes isn't read twice.",
    "  two spaces,\n\n  lines\r\n and\ttabs   ",
    "We'LL see: naïve café — 東京 12.5% 🙂",
    "def f(x):\n    return x // 2  # halves",
    "<s> is no token here</s>, nor is <|x|>",
)
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
DEMO = Path(headstock_demo.checkpoint.__path__[0])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@cache
def train(*, of_bytes: bool) -> dict[str, Any]:
    """A small vocabulary of this project's words, with its merges."""
    backend = Backend(models.BPE())
    alphabet: list[str] = []
    if of_bytes:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=alphabet, special_tokens=[]
    )
    text = (ROOT / "README.md").read_text() + "".join(map(str, range(100, 1000, 7)))
    backend.train_from_iterator(text.splitlines(), trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def describe_bytes(pre: str) -> dict[str, Any]:
    """The keys of a tokenizer of bytes."""
    model = train(of_bytes=True)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|x|>", "<think>"],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def describe_pieces() -> dict[str, Any]:
    """The keys of a tokenizer of SentencePiece."""
    model = train(of_bytes=False)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merged = {left + right: rank for rank, (left, right) in enumerate(model["merges"])}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *pieces],
        "tokenizer.ggml.scores": [
            *[0.0] * (3 + len(BYTES)),
            *(-float(merged.get(piece, 10_000)) for piece in pieces),
        ],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * len(BYTES), *[1] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def make_tokenizer(tmp_path: Path, values: dict[str, Any]) -> Tokenizer:
    """The tokenizer that is made of the keys."""
    path = tmp_path / "ours.gguf"
    path.write_bytes(make_file(values, {}))
    metadata = Metadata(read_gguf_header(path).metadata)
    for name, content in translate_tokenizer(metadata).items():
        (tmp_path / name).write_text(json.dumps(content))
    return Tokenizer(tmp_path)


def make_judge(tmp_path: Path, values: dict[str, Any]) -> Backend:
    """The tokenizer that transformers makes of the file."""
    path = tmp_path / "judge.gguf"
    path.write_bytes(make_file(values, {}))
    library = pytest.importorskip("transformers.integrations.gguf")
    architecture, tokenizer, _ = library.get_gguf_tokenizer(str(path))
    backend, _ = library.convert_gguf_tokenizer(architecture, tokenizer)
    return backend


@pytest.mark.feature("R10")
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_bytes_are_split_as_transformers_splits_them(pre: str, tmp_path: Path) -> None:
    values = describe_bytes(pre)
    ours, judge = make_tokenizer(tmp_path, values), make_judge(tmp_path, values)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == judge.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        (
            ("dbrx", "smaug-bpe"),
            ["We", "'LL", " pay", " ", "123", "45", " in", " XmlNode", "."],
        ),
        (("gpt-4o",), ["We'LL", " pay", " ", "123", "45", " in", " Xml", "Node", "."]),
        (
            ("refact", "starcoder", "command-r", "smollm"),
            ["We", "'", "LL", " pay", " ", *"12345", " in", " XmlNode", "."],
        ),
    ],
    ids=lambda each: each[0],
)
def test_text_is_split_as_each_name_says(
    names: tuple[str, ...], pieces: list[str], tmp_path: Path
) -> None:
    for name in names:
        path = tmp_path / "ours.gguf"
        path.write_bytes(make_file(describe_bytes(name), {}))
        files = translate_tokenizer(Metadata(read_gguf_header(path).metadata))
        splitter = Backend.from_str(json.dumps(files["tokenizer.json"])).pre_tokenizer
        found = splitter.pre_tokenize_str("We'LL pay 12345 in XmlNode.")
        assert [piece.replace("\u0120", " ") for piece, _ in found] == pieces, name


@pytest.mark.feature("R10")
def test_marks_belong_to_the_letters_before_them_where_the_name_says_so(tmp_path: Path) -> None:
    pieces = {"qwen2": ["ह", "ी", " न", "ी"], "qwen35": ["ही", " नी"]}
    for name, expected in pieces.items():
        path = tmp_path / "ours.gguf"
        path.write_bytes(make_file(describe_bytes(name), {}))
        content = translate_tokenizer(Metadata(read_gguf_header(path).metadata))["tokenizer.json"]
        assert content["normalizer"] == {"type": "NFC"}
        split = Backend.from_str(json.dumps(content)).pre_tokenizer
        spans = [span for _, span in split.pre_tokenize_str("ही नी")]
        assert ["ही नी"[first:last] for first, last in spans] == expected


@pytest.mark.feature("R10")
def test_pieces_are_merged_as_transformers_merges_them(tmp_path: Path) -> None:
    values = describe_pieces()
    ours, judge = make_tokenizer(tmp_path, values), make_judge(tmp_path, values)
    for text in (each.lstrip() for each in TEXTS[:-1]):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == judge.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text
        assert ours.encode(text) == [1, *ids]
    # As published files have it: one space more is put before those that are there.
    space = ours.find_id("\u2581")
    assert ours.encode("  a", add_special_tokens=False)[:2] == [space, space]
    assert ours.decode(ours.encode("  a")) == "  a"


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "of-tomorrow"}, "got 'of-tomorrow', so how its tokenizer splits"),
        ({"tokenizer.ggml.pre": None}, "got None, so how its tokenizer splits text is not known"),
        ({"tokenizer.ggml.model": "t5"}, "expected gpt2 or llama, got t5"),
        ({"tokenizer.ggml.merges": ["a"]}, "expected two tokens with a space between, got 'a'"),
        ({"tokenizer.ggml.merges": ["a \u00e9\u00e9"]}, "which tokenizer.ggml.tokens lacks"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "one a token, got 2"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "tokens, got 5000"),
        ({"tokenizer.ggml.tokens": None}, "is missing or empty"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, shape("llama"))
    values = {**describe_bytes("qwen2"), **changes}
    write_gguf(tmp_path, tmp_path / "small.gguf", changes=values)
    with pytest.raises(ModelError) as error:
        resolve_directory(str(tmp_path / "small.gguf"))
    assert message in str(error.value) and "or convert it: pip install gguf" in str(error.value)


@pytest.mark.feature("R10")
def test_a_file_without_a_tokenizer_is_served_by_ids(tmp_path: Path) -> None:
    write(tmp_path, shape("llama"))
    write_gguf(tmp_path, tmp_path / "small.gguf")
    directory = resolve_directory(str(tmp_path / "small.gguf"))
    assert isinstance(open_tokenizer(directory), NoTokenizer)


@pytest.mark.feature("R10")
def test_the_demo_model_makes_its_sums_from_a_file(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    ends = {"tokenizer.ggml.eot_token_id": 0, "general.sampling.temp": 0.0}
    keys = {**describe_tokenizer(DEMO, "smollm"), **ends}
    write_gguf(tmp_path, tmp_path / "demo.gguf", "BF16", keys)

    found = []
    for model in (str(tmp_path / "demo.gguf"), str(DEMO)):
        with LLM(model, device="cpu", num_pages=64) as llm:
            found.append(
                [answer.outputs[0].token_ids for answer in llm.generate(["12+30=", "7+8="])]
            )
    assert found[0] == found[1]
