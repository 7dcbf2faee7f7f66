"""The demo model with tokens for the marks of reasoning and of calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import headstock_demo

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SETTINGS = {"special": False, "single_word": False, "lstrip": False, "rstrip": False}


def write_marked_checkpoint(folder: Path) -> dict[str, int]:
    """Write the checkpoint into a folder, and return the ids of the marks.

    They take the place of the tokens that the tokenizer learned last.
    """
    source = Path(headstock_demo.__file__).parent / "checkpoint"
    for file in source.iterdir():
        shutil.copy(file, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    replaced = sorted(vocab, key=vocab.get)[-len(MARKS) :]
    assert replaced == ["".join(merge) for merge in merges[-len(MARKS) :]]
    del merges[-len(MARKS) :]
    ids = {mark: vocab.pop(token) for mark, token in zip(MARKS, replaced, strict=True)}
    vocab.update(ids)
    tokenizer["added_tokens"] += [
        {"id": token, "content": mark, "normalized": False, **SETTINGS}
        for mark, token in ids.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ids
