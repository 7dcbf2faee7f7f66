"""A small tokenizer: every byte, and some words that span parts of an answer."""

from __future__ import annotations

import json
from pathlib import Path

from headstock.spi import Vocabulary

_MERGES = (
    "t r",
    "tr u",
    "tru e",
    "n o",
    "n u",
    "nu l",
    "nul l",
    "a b",
    "ab c",
    '" a',
    '" :',
    "1 2",
)
_PADDING = 7
"""Scores of the model without a token."""


def list_byte_characters() -> list[str]:
    """By byte, its character in byte-level vocabularies like GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    codes = dict(zip(plain, plain, strict=True)) | {b: 256 + i for i, b in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


BYTE_CHARACTERS = list_byte_characters()
TOKENS = ["<|end|>", *BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in _MERGES)]
END = 0
SIZE = len(TOKENS) + _PADDING


def write_tokenizer(folder: Path) -> Vocabulary:
    """Write the tokenizer, and return the vocabulary that names it."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    file = folder / "tokenizer.json"
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": END,
                "content": TOKENS[END],
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(TOKENS)},
            "merges": list(_MERGES),
        },
    }
    file.write_text(json.dumps(tokenizer))
    return Vocabulary(tokenizer_file=str(file), size=SIZE, end_ids=(END,))


def encode_bytes(text: str) -> list[int]:
    """The tokens of a text, one per byte."""
    return [1 + byte for byte in text.encode()]


def decode_tokens(tokens: list[int]) -> str:
    """The text of tokens."""
    byte_of = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    texts = (TOKENS[token] for token in tokens)
    return bytes(byte_of[character] for text in texts for character in text).decode()
