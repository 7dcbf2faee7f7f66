"""Tokenizers read without transformers: they are its own, or they are left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Inner

from headstock.text.chat import render_chat
from headstock.text.plain_tokenizer import read_plain_tokenizer
from headstock.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "hello world 😀 日本",
    "<|end|>hello<|im|> the <|odd|>",
    " <tool>quick</tool> <|end|> ",
    "",
)


def spell(content: str, **options: bool) -> dict[str, Any]:
    """A token as `added_tokens_decoder` writes it."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, "special": True, **flags, **options}


DECODER = {"0": spell("<|end|>"), "1": spell("<|im|>")}
QWEN = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "added_tokens_decoder": DECODER,
    "additional_special_tokens": ["<|im|>"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|end|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|end|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
LLAMA = {
    "add_bos_token": True,
    "add_eos_token": False,
    "added_tokens_decoder": DECODER,
    "bos_token": {"__type": "AddedToken", **spell("<|im|>")},
    "eos_token": {"__type": "AddedToken", **spell("<|end|>")},
    "legacy": False,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "use_default_system_prompt": False,
}
GEMMA = {"extra_special_tokens": {"image_token": "<|im|>"}, "eos_token": "<|end|>", "image": None}
SAVED_BY_TRANSFORMERS_5 = {"backend": "tokenizers", "eos_token": "<|end|>", "is_local": True}


def write(source: Path, directory: Path, fields: object, **files: object) -> Path:
    """A directory with a byte-level tokenizer and these files."""
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    if fields is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def compare(directory: Path) -> None:
    """Assert that the tokenizer is the one of transformers."""
    expected, actual = load_tokenizer(directory), Tokenizer(directory)
    backend = expected.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    for text in TEXTS:
        for adds in (True, False):
            ids = backend.encode(text, add_special_tokens=adds).ids
            assert actual.encode(text, add_special_tokens=adds) == ids
            for skips in (True, False):
                text_back = backend.decode(ids, skip_special_tokens=skips)
                assert actual.decode(ids, skip_special_tokens=skips) == text_back
    assert actual.eos_ids == tuple([] if expected.eos_token_id is None else [expected.eos_token_id])
    assert actual.vocab_size == backend.get_vocab_size(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    assert actual.special_ids == {token for token, entry in added.items() if entry.special}


@pytest.mark.parametrize(
    "config",
    [QWEN, LLAMA, GEMMA, SAVED_BY_TRANSFORMERS_5, {}, None],
    ids=["qwen", "llama", "gemma", "saved by transformers 5", "empty", "no file"],
)
def test_what_published_checkpoints_say_is_in_their_tokenizer_json(
    byte_level: Path, tmp_path: Path, config: object
) -> None:
    directory = write(byte_level, tmp_path, config, config={"model_type": "qwen3"})
    assert read_plain_tokenizer(directory) is not None
    compare(directory)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"eos_token": "<|odd|>"}, {}),
        ({"unk_token": "<|odd|>", "eos_token": "<|end|>"}, {}),
        ({"extra_special_tokens": ["<|odd|>"]}, {}),
        ({"additional_special_tokens": ["<|odd|>"]}, {}),
        ({"image_token": "<|odd|>"}, {}),
        ({"added_tokens_decoder": DECODER | {"400": spell("<|odd|>")}}, {}),
        ({"added_tokens_decoder": {"1": spell("<|im|>", lstrip=True)}}, {}),
        ({"split_special_tokens": True}, {}),
        ({"eos_token": "<|end|>"}, {"special_tokens_map": {"pad_token": "<|odd|>"}}),
        ({"eos_token": "<|end|>"}, {"added_tokens": {"<|odd|>": 400}}),
    ],
)
def test_what_transformers_adds_or_alters_is_left_to_it(
    byte_level: Path, tmp_path: Path, config: object, files: dict[str, object]
) -> None:
    directory = write(byte_level, tmp_path, config, **files)
    assert read_plain_tokenizer(directory) is None
    compare(directory)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"eos_token": 5},
        {"eos_token": {"content": "<|end|>"}},
        {"added_tokens_decoder": {"0": "<|end|>"}},
        {"auto_map": {"AutoTokenizer": ["evil.T", None]}},
        {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]},
        {"fix_mistral_regex": True},
    ],
)
def test_what_transformers_refuses_or_reads_elsewhere_is_left_to_it(
    byte_level: Path, tmp_path: Path, config: object
) -> None:
    assert read_plain_tokenizer(write(byte_level, tmp_path, config)) is None


def test_a_large_vocabulary_of_a_kind_that_had_a_fault_is_left_to_transformers(
    byte_level: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.text.plain_tokenizer._LARGE_VOCABULARY", 50)
    for model_type, is_plain in (("mistral", False), (None, False), ("qwen3", True)):
        directory = write(byte_level, tmp_path, QWEN, config={"model_type": model_type})
        assert (read_plain_tokenizer(directory) is not None) == is_plain


TOKENS = st.sampled_from([None, "<|end|>", "<|im|>", "<|odd|>", "hello", "<tool>"])
ENTRIES = st.builds(
    spell,
    st.sampled_from(["<|end|>", "<|im|>", "<|odd|>"]),
    special=st.booleans(),
    normalized=st.booleans(),
    lstrip=st.booleans(),
)


@settings(max_examples=40)
@given(
    config=st.fixed_dictionaries(
        {},
        optional={
            "eos_token": TOKENS,
            "bos_token": TOKENS,
            "pad_token": TOKENS,
            "image_token": TOKENS,
            "add_bos_token": st.booleans(),
            "add_eos_token": st.booleans(),
            "extra_special_tokens": st.lists(TOKENS.filter(bool), max_size=2),
            "additional_special_tokens": st.lists(TOKENS.filter(bool), max_size=2),
            "added_tokens_decoder": st.dictionaries(st.sampled_from("012"), ENTRIES, max_size=2),
        },
    ),
    begins=st.booleans(),
    adds=st.booleans(),
    limits=st.booleans(),
)
def test_tokenizers_are_those_of_transformers_whatever_is_said_of_them(
    byte_level: Path, config: dict[str, Any], begins: bool, adds: bool, limits: bool
) -> None:
    inner = Inner.from_file(str(byte_level / "tokenizer.json"))
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single="<|im|> $A", special_tokens=[("<|im|>", 1)]
        )
    if adds:
        inner.add_tokens([AddedToken("<tool>", normalized=False)])
    if limits:
        inner.enable_truncation(5)
        inner.enable_padding(pad_token="<|im|>", length=9)
    with TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        compare(Path(folder))


def test_a_chat_loads_transformers_tokenizer_which_then_serves_texts_too(
    byte_level: Path,
) -> None:
    tokenizer = Tokenizer(byte_level)
    before = tokenizer.encode("hello <|im|>"), tokenizer.backend
    assert render_chat(tokenizer, [{"role": "user", "content": "x"}]).startswith("<|im|>user: x")
    assert tokenizer.backend is tokenizer.hf_tokenizer.backend_tokenizer is not before[1]
    assert tokenizer.encode("hello <|im|>") == before[0]


@pytest.mark.full
def test_a_run_of_a_text_imports_no_transformers() -> None:
    code = (
        "import sys; from headstock.cli.main import main; "
        "code = main(['run', '--prompt', 'Once', '--max-tokens', '2', '--quiet']); "
        "print(code, 'tokenizers' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "0 True False"


def test_a_session_loads_what_chats_need_when_it_is_told(scripted: Any) -> None:
    session = scripted()[0]._session
    before = session.tokenizer.backend
    session.prepare_chats()
    assert session.tokenizer.backend is not before
