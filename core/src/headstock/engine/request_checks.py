"""What a request needs from the model and the runner, checked again when it enters the engine."""

from __future__ import annotations

import numpy as np

from headstock.errors import RequestError
from headstock.scheduler import Request
from headstock.spi import RunnerSpec


def check_served(request: Request, vocab: int, runner: RunnerSpec) -> None:
    """Raise RequestError when the model or the runner cannot serve the request."""
    _check_tokens(request, vocab)
    _check_pooling(request, runner)


def _check_tokens(request: Request, vocab: int) -> None:
    """Raise RequestError when a token of the request is beyond the `vocab` ids of the logits."""
    prompt = request.prompt
    # As numbers without a sign, negative ones are the largest.
    if len(prompt) and int(prompt.view(np.uint32).max()) >= vocab:
        wrong = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
        raise RequestError(f"token {wrong} is not in the vocabulary of {vocab}", "prompt")
    for name in ("logit_bias", "allowed_token_ids"):
        ids = getattr(request.params, name) or (0,)
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(f"{name}: token {wrong} is not in the vocabulary of {vocab}", name)


def _check_pooling(request: Request, runner: RunnerSpec) -> None:
    """Raise RequestError when the request pools hidden states and the runner cannot."""
    if request.pooling and not runner.capabilities.pooling:
        raise RequestError(
            f"the runner {runner.name} does not support pooling; set runner (--runner) to eager",
            "pooling",
        )
