"""Text for the toy model: a tokenizer of its 50 tokens, with letters, characters of several bytes and lone bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import toy_plugins
from core.schedule.toy import VOCAB
from tokenizers import Tokenizer, decoders, models

from headstock import LLM

EOS = 0
"""The token that ends an answer."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in "😀日é".encode())
LETTERS = ("a", "b", "c", " ", "ab", "ba", "é", "日", "本", "😀")
PIECES = ("</s>", *BYTES, *LETTERS, *(chr(ord("A") + i) for i in range(VOCAB - 1 - len(BYTES) - len(LETTERS))))


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer of the toy model to its checkpoint."""
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["</s>"])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def toy_llm(folder: Path, **settings: Any) -> LLM:
    """The toy model behind LLM; `folder` is one that `toy_engine.installed` has put on the path."""
    checkpoint = toy_plugins.install(folder)
    write_tokenizer(checkpoint)
    parts = {"attn": "toy", "ops": "toy", "runner": "eager", "load_format": "dummy", "max_seq_len": 160}
    small = {"num_pages": 60, "page_size": 4, "max_running_requests": 4, "max_batch_tokens": 24}
    return LLM(str(checkpoint), **(parts | small | {"debug_invariants": True} | settings))
