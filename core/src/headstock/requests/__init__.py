"""From prompts to requests, and from the engine's updates to outputs.

Names are imported when they are first used: what makes requests needs no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.requests.embedding_request import EmbeddingRequest
    from headstock.requests.engine_protocol import EngineLoop, StartedEngine
    from headstock.requests.prompt_request import PromptRequest
    from headstock.requests.scorer import ScoreBatch, ScoreOptions
    from headstock.requests.session import EngineSession, start_engine

__all__ = [
    "EmbeddingRequest",
    "EngineLoop",
    "EngineSession",
    "PromptRequest",
    "ScoreBatch",
    "ScoreOptions",
    "StartedEngine",
    "start_engine",
]

_HOMES = {
    "EmbeddingRequest": "headstock.requests.embedding_request",
    "EngineLoop": "headstock.requests.engine_protocol",
    "EngineSession": "headstock.requests.session",
    "PromptRequest": "headstock.requests.prompt_request",
    "ScoreBatch": "headstock.requests.scorer",
    "ScoreOptions": "headstock.requests.scorer",
    "StartedEngine": "headstock.requests.engine_protocol",
    "start_engine": "headstock.requests.session",
}


def __getattr__(name: str) -> object:
    """The exported name, from the module where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock.requests' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
