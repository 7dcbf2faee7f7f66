"""Tokenizers of directories, good and bad."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headstock.errors import ModelError, RequestError
from headstock.text.chat import render_chat
from headstock.text.generation_config import read_generation_config
from headstock.text.tokenizer import NoTokenizer, Tokenizer, open_tokenizer


def test_encode_and_decode_are_inverse(tokenizer: Tokenizer) -> None:
    text = "hello world 😀 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.byte_ids == frozenset()
    assert not tokenizer.has_token(tokenizer.vocab_size)


def test_byte_fallback_vocabularies_are_recognized(byte_fallback: Path) -> None:
    tokenizer = Tokenizer(byte_fallback)
    assert len(tokenizer.byte_ids) == 256
    assert tokenizer.decode(tokenizer.encode("日")) == "日"


def test_half_a_surrogate_pair_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("x\ud83d")


@pytest.mark.feature("W14")
def test_other_threads_go_on_while_a_long_text_is_encoded_or_decoded(tokenizer: Tokenizer) -> None:
    text = "hello world " * 30_000
    tokens: list[int] = []

    def count_turns(work: Callable[[], object]) -> int:
        """The turns that this thread gets while another works."""
        may_begin = threading.Event()
        thread = threading.Thread(target=lambda: may_begin.wait() and work())
        thread.start()
        may_begin.set()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        return turns

    assert count_turns(lambda: tokens.extend(tokenizer.encode(text))) > 20
    assert count_turns(lambda: [tokenizer.decode(tokens) for _ in range(10)]) > 20
    assert tokenizer.decode(tokens) == text


def test_a_missing_directory_is_a_model_error_with_a_next_move(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"set model \(--model\) to a checkpoint directory"):
        Tokenizer(tmp_path / "none")


LOOKED_FOR = "tokenizer.json, tokenizer.model, tekken.json, vocab.json, vocab.txt"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", None])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", None])
def test_a_directory_without_a_vocabulary_has_no_tokenizer(
    tmp_path: Path, model_type: str | None, tokenizer_class: str | None
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type} if model_type else {})
    )
    if tokenizer_class:
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": tokenizer_class})
        )
    said = rf"^no tokenizer in .*; looked for {re.escape(LOOKED_FOR)}; copy or download it there"
    with pytest.raises(ModelError, match=said):
        Tokenizer(tmp_path)

    absent = open_tokenizer(tmp_path)

    assert isinstance(absent, NoTokenizer)
    assert (absent.decode([5, 6]), absent.eos_ids, absent.has_token(5)) == ("", (), False)
    with pytest.raises(ModelError, match=said):
        absent.encode("x")
    with pytest.raises(ModelError, match=said):
        render_chat(absent, [{"role": "user", "content": "x"}])


def test_a_vocabulary_with_merges_is_a_tokenizer(byte_level: Path, tmp_path: Path) -> None:
    model = json.loads((byte_level / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert Tokenizer(tmp_path).encode("hello") == Tokenizer(byte_level).encode("hello")


def test_a_damaged_tokenizer_is_not_taken_for_an_absent_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(ModelError, match=r"is tokenizer\.json whole\? Copy or download it again$"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    )
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is a Git LFS pointer: fetch the file with git lfs pull$"
    ):
        open_tokenizer(tmp_path)


def test_a_sentencepiece_model_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.text.tokenizer.is_installed", lambda distribution: False)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    said = "tokenizer.model needs sentencepiece and protobuf: pip install sentencepiece protobuf$"
    with pytest.raises(ModelError, match=said):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "{bad", "[]", '{"version": "1.0"}'])
def test_an_unreadable_tokenizer_is_one_line(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_config_json_that_transformers_refuses_is_what_gets_the_blame(
    byte_level: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(
        (byte_level / "tokenizer_config.json").read_bytes()
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "bos_token_id": "x"}')
    with pytest.raises(
        ModelError, match=r"^config\.json in .* cannot be read by transformers: .*'bos_token_id'"
    ):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(ModelError, match="tokenizer in"):
        Tokenizer(tmp_path)


def test_code_in_a_checkpoint_is_not_run(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\nclass T: pass\n")
    settings = json.loads((byte_level / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="needs Python code of its own, which is never run"):
        Tokenizer(tmp_path)


def test_generation_config_gives_defaults_and_ends(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).params.temperature == 1.0
    values = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_new_tokens": 7,
        "eos_token_id": [3, 4],
        "x": 1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = read_generation_config(tmp_path)
    chosen = found.params
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.max_tokens) == (0.6, 20, 0.95, 7)
    assert found.eos_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6, "eos_token_id": 5}'
    )
    assert read_generation_config(tmp_path).params.temperature == 0.0
    assert read_generation_config(tmp_path).eos_ids == (5,)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"temperature": 5}', '{"temperature": NaN}', '{"eos_token_id": "x"}', "\xff"],
)
def test_a_bad_generation_config_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="correct or remove the file") as caught:
        read_generation_config(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_json_is_read_without_importing_transformers_or_for_chats_its_models(
    byte_level: Path,
) -> None:
    code = "import sys; from pathlib import Path; from headstock.text.tokenizer import Tokenizer\n"
    code += (
        "tokenizer = Tokenizer(Path(sys.argv[1])); print('transformers' in sys.modules)\n"
        "tokenizer.hf_tokenizer; print('transformers.generation' in sys.modules, "
        "'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(byte_level)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )

    assert done.stdout.split() == ["False", "False", "False"]
