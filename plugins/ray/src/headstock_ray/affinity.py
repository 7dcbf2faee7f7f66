"""Which requests belong to one conversation, so that one replica has its prefix cached."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

SESSION_HEADER = b"x-session-id"
_CONVERSATIONS = ("messages", "input")
"""Where bodies of chats and of responses have the turns."""


def find_session(headers: list[tuple[bytes, bytes]], body: bytes) -> str:
    """The name of a request's conversation; empty where it has none.

    It is the header x-session-id, else `prompt_cache_key` in the body, else the beginning of the
    conversation up to its first turn of a user, which later turns repeat.
    """
    for header, value in headers:
        if header.lower() == SESSION_HEADER and value:
            return _digest(b"header", value)
    try:
        content = msgspec.json.decode(body) if body[:1].strip() == b"{" else None
    except msgspec.DecodeError:
        return ""  # the replica says what is wrong
    if not isinstance(content, Mapping):
        return ""
    key = content.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest(b"key", key.encode("utf-8", "surrogatepass"))
    for name in _CONVERSATIONS:
        turns = content.get(name)
        if isinstance(turns, str) and turns:
            turns = [{"role": "user", "content": turns}]
        if isinstance(turns, list) and turns:
            beginning = [content.get("instructions"), *_take_beginning(turns)]
            return _digest(b"turns", msgspec.json.encode(beginning))
    return ""


def _take_beginning(turns: list[Any]) -> list[Any]:
    """The roles and contents of turns up to the first one of a user."""
    taken = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            break
        taken.append([turn.get("role"), turn.get("content")])
        if turn.get("role") == "user":
            break
    return taken


def _digest(kind: bytes, content: bytes) -> str:
    """A name of fixed length, which tells nothing of the content."""
    return hashlib.blake2b(kind + b"\0" + content, digest_size=16).hexdigest()
