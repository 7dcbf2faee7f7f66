"""GGUF files as hostile input: every one is opened, or refused in one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Stored, describe, make_file, write_plain

from headstock.errors import HeadstockError
from headstock.startup.model_loading import read_model
from headstock.text.tokenizer import open_tokenizer
from headstock.weights import load_weights, resolve_directory
from headstock_conformance.model.parity import shape

HF = shape("llama", num_hidden_layers=1, vocab_size=8)
TOKENS = ["<s>", "</s>", "a", "b", "ab", "<u>", "c", "d"]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": ["a b"],
    },
    "llama": {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        "tokenizer.ggml.unknown_token_id": 5,
    },
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def tensors() -> dict[str, Stored]:
    """The tensors of `HF`, with factors of positions."""
    shapes = {
        "token_embd": (8, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (64, 32),
        "blk.0.attn_k": (32, 32),
        "blk.0.attn_v": (32, 32),
        "blk.0.attn_output": (32, 64),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (48, 32),
        "blk.0.ffn_up": (48, 32),
        "blk.0.ffn_down": (32, 48),
    }
    ones = {f"{name}.weight": write_plain(torch.ones(each), "F16") for name, each in shapes.items()}
    return {**ones, "rope_freqs.weight": write_plain(torch.ones(8), "F32")}


def metadata(tokenizer: str) -> dict[str, Any]:
    """The keys of `HF` with that tokenizer."""
    return {
        **describe(HF),
        "llama.rope.scaling.type": "none",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 2, 4, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **TOKENIZERS[tokenizer],
    }


def open_model(path: Path) -> None:
    """Read everything that a file has.   raises: HeadstockError"""
    directory = resolve_directory(str(path))
    family, config = read_model(directory)
    load_weights(
        directory,
        family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=16,
    )
    tokenizer = open_tokenizer(directory)
    if tokenizer.vocab_size:
        tokenizer.decode(tokenizer.encode("ab <u> c"))


CLAIMS = (0, 1, 2, 3, 8, 9, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
"""Numbers for the places of counts, lengths, types and offsets."""

VALUES = (None, 0, 1, 3, 64, 2**31, 2**32 - 1, True, -1.0, 0.0, 1e38, float("nan"), float("inf"))
LISTS = ("", "none", "a b", [], [7], [-1] * 8, [0.5] * 8, [float("nan")] * 8, ["a"], ["a b"] * 8)


def change_values(values: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The keys with one or two other values; None takes a key out."""
    chosen = {chance.choice(list(values)): chance.choice((*VALUES, *LISTS)) for _ in range(2)}
    return {key: each for key, each in (values | chosen).items() if each is not None}


def damage(content: bytes, header: int, chance: random.Random) -> bytes:
    """The content with a few changes to its header, which is `header` bytes long."""
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(header, len(damaged) + 1))
        match chance.randrange(4):
            case 0:
                damaged[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                damaged[at : at + 8] = struct.pack("<Q", chance.choice(CLAIMS))
            case 2:
                damaged[at : at + 4] = struct.pack("<I", chance.choice(CLAIMS) % 2**32)
            case _:
                del damaged[at : at + chance.choice((1, 4, 8, len(damaged)))]
    return bytes(damaged)


def attack(tmp_path: Path, count: int, seed: int) -> list[HeadstockError]:
    """Open so many files with other headers.   returns: the refusals"""
    refusals: list[HeadstockError] = []
    chance, path = random.Random(seed), tmp_path / "small.gguf"
    for each in range(count):
        values = metadata(list(TOKENIZERS)[each % 2])
        if each % 4 < 2:
            content = make_file(change_values(values, chance), tensors())
        else:
            # What is said of tensors takes fewer bytes than their numbers, which may be any.
            content = make_file(values, tensors())
            content = damage(content, len(make_file(values, {})) + 700, chance)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        try:
            open_model(path)
        except HeadstockError as error:
            refusals.append(error)
    return refusals


def check_refusals(refusals: list[HeadstockError], count: int) -> None:
    """Each is one line with an exit code of models; of `count` files some were opened."""
    for error in refusals:
        assert error.exit_code in (5, 6), error
        assert "\n" not in str(error)
    assert count // 2 < len(refusals) < count


@pytest.mark.feature("R10")
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_file_is_opened_as_it_is(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(make_file(metadata(tokenizer), tensors()))
    open_model(tmp_path / "small.gguf")


@pytest.mark.feature("R10")
def test_damaged_headers_are_opened_or_refused_in_one_line(tmp_path: Path) -> None:
    check_refusals(attack(tmp_path, 100, 0), 100)


@pytest.mark.feature("R10")
@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
def test_more_damaged_headers_are_opened_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    check_refusals(attack(tmp_path, 500, seed), 500)
