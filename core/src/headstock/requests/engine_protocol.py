"""The engine as requests see it: what `LLM(start=...)` must give, in this process or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headstock.config import EngineConfig
from headstock.outputs import Update
from headstock.scheduler.request import Request

if TYPE_CHECKING:
    from headstock.engine.stats import EngineStats
    from headstock.selection.request_args import RequestArgs
    from headstock.startup.summary import EngineSummary


class ServedModel(Protocol):
    """The model of an engine; `vocab` is the number of its scores."""

    @property
    def vocab(self) -> int: ...


class StartedEngine(Protocol):
    """An engine that is ready for requests; its loop steps it.

    `directory` holds the model's tokenizer, `length_hint` says in errors what would allow
    more tokens than `max_seq_len`. `request_args` are what requests may give plugins; None where
    only the engine's process can tell. `check_sampling` raises RequestError for what the engine
    would refuse at `submit`, such as the grammar of an answer; None where only `submit` tells.
    """

    @property
    def directory(self) -> Path: ...
    @property
    def model(self) -> ServedModel: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def length_hint(self) -> str: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def summary(self) -> EngineSummary: ...
    @property
    def request_args(self) -> RequestArgs | None: ...
    @property
    def check_sampling(self) -> Callable[[Request], None] | None: ...
    @property
    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats:
        """Counts since the start, and at the moment."""

    def close(self) -> None:
        """Free the device."""


class EngineLoop(Protocol):
    """Steps an engine on its own thread, and calls the sinks of requests there.

    A sink gets each update of its request, the one with a finish reason last. That with the first
    token has `cached_tokens`.
    `has_ended`: the thread has ended, and no sink is called any more.
    """

    has_ended: bool

    def submit(
        self, request: Request, sink: Callable[[Update], None], *, stream_tokens: bool = True
    ) -> None:
        """Queue `request`.

        Without `stream_tokens`, its sink gets the first token at once and the others in one update
        at the end.
        raises: RequestError, EngineDied
        """

    def check_alive(self) -> None:
        """Raise EngineDied when the engine cannot go on."""

    def abort(self, request_id: str, /) -> None:
        """End the request with this id; unknown ids are ignored."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index before requests that are submitted later.   raises: EngineDied"""

    def close(self) -> None:
        """Stop after the step that runs; requests that are left end with reason "abort"."""

    def abandon(self) -> None:
        """Stop as `close` does and close the engine then, without waiting for either."""


StartEngine = Callable[[EngineConfig], tuple[StartedEngine, EngineLoop]]
"""Starts an engine for a configuration, and the loop that steps it."""
