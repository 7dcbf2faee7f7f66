"""Logits processors for the toy model, whose effect can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstock.scheduler import Request
from headstock.spi import LogitColumn, LogitsProcessor, LogitsSpec, SpiRange
from headstock.spi.arrays import Ints
from headstock_conformance.scheduler.toy_device import VOCAB, next_token


def shift_spec() -> LogitsSpec:
    """The processor `shift`."""
    return LogitsSpec(
        name="shift",
        spi=SpiRange(0, 3),
        summary="moves scores to other tokens",
        implementation="toy_processor:Shift",
    )


def sharpen_spec() -> LogitsSpec:
    """The processor `sharpen`."""
    return LogitsSpec(
        name="sharpen",
        spi=SpiRange(0, 3),
        summary="keeps the best token alone",
        implementation="toy_processor:Sharpen",
    )


def find_shift(prompt: Sequence[int] | Ints) -> int:
    """By how much `shift` moves a request's scores: those that begin with an odd token."""
    return int(prompt[0]) % 7 if int(prompt[0]) % 2 else 0


def shifted_answer(request: Request) -> list[int]:
    """The greedy answer of a request with `shift`: every second token is moved."""
    prompt = [int(token) for token in request.prompt]
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        moved = 0 if len(answer) % 2 else find_shift(prompt)
        answer.append((next_token([*prompt, *answer]) + moved) % VOCAB)
        if answer[-1] in request.stop_ids and len(answer) >= request.min_tokens:
            break
    return answer


class Shift(LogitsProcessor):
    """Moves the scores of every second token up by some ids."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """By how much, and where the answer begins."""
        return {
            "by": LogitColumn(neutral=0, dtype="int64"),
            "begin": LogitColumn(neutral=0, dtype="int64"),
        }

    @property
    def changes_argmax(self) -> bool:
        """Another token is the best."""
        return True

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """Requests that begin with an odd token."""
        by = find_shift(prompt)
        return {"by": by, "begin": len(prompt)} if by else None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Move the scores."""
        moved = columns["by"] * ((at - columns["begin"]) % 2 == 0)
        places = torch.arange(logits.shape[1], device=logits.device) - moved[:, None]
        return logits.gather(1, places % logits.shape[1])


class Sharpen(LogitsProcessor):
    """Leaves the best token alone, for requests that begin with a multiple of three."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """How far below the best others may be, by its first entry."""
        return {"reach": LogitColumn(neutral=1e9, width=2)}

    @property
    def changes_argmax(self) -> bool:
        """The best token stays."""
        return False

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """Requests that begin with a multiple of three."""
        return None if int(prompt[0]) % 3 else {"reach": (1e-9, 7.0)}

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Drop the scores below."""
        reach = columns["reach"][:, :1]
        return logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - reach, -torch.inf)
