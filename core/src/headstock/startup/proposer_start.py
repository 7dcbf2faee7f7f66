"""Start the proposer of an engine, and end it where the rest of the start fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headstock.errors import CannotRun, shorten
from headstock.spi import DraftModel, ProposerContext
from headstock.startup.decisions import DecidedParts

OpenModel = Callable[[str, Mapping[str, Any]], DraftModel]
"""See `ProposerContext.open_model`."""


@contextmanager
def started_proposer(decided: DecidedParts, open_model: OpenModel | None) -> Iterator[None]:
    """Start the proposer, if there is one and `open_model` says that this rank has the engine.

    It ends with the block only where that raises.

    raises: CannotRun when it cannot serve the engine
    """
    selected = decided.parts.proposer
    if selected is None or open_model is None:
        yield
        return
    context = ProposerContext(
        vocab=decided.chosen.model.vocab,
        max_rows=decided.config.max_running_requests,
        max_len=decided.max_len,
        device=decided.env.device,
        draft_model=decided.config.draft_model or "",
        open_model=open_model,
    )
    try:
        try:
            selected.proposer.start(context)
        except ValueError as error:
            name = f"proposer (--proposer) {selected.spec.name}"
            raise CannotRun(f"{name}: {shorten(error, 400)}") from error
        yield
    except BaseException:
        selected.proposer.close()
        raise
