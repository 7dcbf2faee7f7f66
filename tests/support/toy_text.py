"""Text for the toy model: a tokenizer of its 50 tokens, with letters, characters of several bytes
and lone bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import toy_plugins
from fault_injection import start_with_faults
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headstock import LLM
from headstock_conformance.scheduler.toy_device import VOCAB

EOS = 0
"""The token that ends an answer."""
LETTERS = ("a", "b", "c", " ", "ab", "ba", "é", "日", "本", "😀")


def spelt(text: str) -> str:
    """Text as byte-level vocabularies spell it: a character a byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in split)


def pieces() -> list[str]:
    """The vocabulary."""
    bytes_alone = dict.fromkeys(character for text in "😀日é" for character in spelt(text))
    known = ["</s>", *bytes_alone, *map(spelt, LETTERS)]
    return known + [chr(ord("A") + i) for i in range(VOCAB - len(known))]


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer of the toy model to its checkpoint."""
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces())}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def toy_llm(folder: Path, faults: tuple[str, ...] = (), **settings: Any) -> LLM:
    """The toy model behind LLM, with these faults in its engine; `folder` is one that
    `toy_engine.installed` has put on the path.
    """
    checkpoint = toy_plugins.install(folder)
    write_tokenizer(checkpoint)
    parts = {
        "attn": "toy",
        "ops": "toy",
        "runner": "eager",
        "load_format": "dummy",
        "max_seq_len": 160,
    }
    small = {"num_pages": 60, "page_size": 4, "max_running_requests": 4, "max_batch_tokens": 24}
    start = start_with_faults(*faults)
    return LLM(
        str(checkpoint), **({"start": start, "debug_invariants": True} | parts | small | settings)
    )
