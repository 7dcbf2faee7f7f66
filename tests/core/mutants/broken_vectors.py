"""Engines that make a prompt's vector of something else than its hidden states, or too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.engine import output_tracker
from headstock.execution import pooling
from headstock.nn import eager_step
from headstock.scheduler import admission, planning

from .broken import Mutant, around

OF_SOMETHING_ELSE = r"pooled .* and not|Not equal to tolerance"


def with_hits(match_prefix: Any, state: Any, request_state: Any) -> Any:
    """A mean is made of what the prefix index leaves."""
    request = evolve(request_state.request, prompt_logprobs=False, pooling="")
    return match_prefix(state, evolve(request_state, request=request))


def of_the_row_before(pool_hidden: Any, hidden: Tensor, batch: Any, record: Any) -> Tensor:
    """A sum goes on from what the row's last request left."""
    return pool_hidden(hidden, evolve(batch, starts=batch.starts.clamp(min=1)), record)


def of_the_last_chunk(pool_hidden: Any, hidden: Tensor, batch: Any, record: Any) -> Tensor:
    """Only the last chunk is summed up."""
    if record.sums is None:
        return pool_hidden(hidden, batch, record)
    return pool_hidden(hidden, batch, evolve(record, sums=torch.zeros_like(record.sums)))


def of_its_length(pool_hidden: Any, hidden: Tensor, batch: Any, record: Any) -> Tensor:
    """A mean is divided by the tokens of the chunk."""
    result: Tensor = pool_hidden(hidden, batch, record)
    ends = batch.query_start[1:].long()[record.rows]
    counts = ends - batch.query_start.long()[record.rows]
    factor = (batch.starts[record.rows] + counts) / counts
    return torch.where(record.is_mean[:, None], result * factor[:, None], result)


def first_chunk(mark_logits: Any, state: Any, num_scheduled: Any) -> Any:
    """A prompt counts as computed with its first chunk."""
    num_logits, samples, stages = mark_logits(state, num_scheduled)
    return num_logits, samples, np.minimum(stages, 1) * 2


def of_a_neighbour(add_embeddings: Any, self: Any, plan: Any, pooled: np.ndarray) -> None:
    """Vectors are given out in another order than that of the plan's rows."""
    add_embeddings(self, plan, pooled[::-1])


def unjudged(find_pooled_health: Any, sample: Any) -> np.ndarray:
    """What rows pooled is never looked at."""
    return np.ones(len(find_pooled_health(sample)), bool)


MISPOOLED = {
    "a mean with prefix hits": Mutant(
        around(admission, "match_prefix", with_hits), OF_SOMETHING_ELSE
    ),
    "sums not begun anew": Mutant(
        around(eager_step, "pool_hidden", of_the_row_before), OF_SOMETHING_ELSE
    ),
    "sums not carried on": Mutant(
        around(eager_step, "pool_hidden", of_the_last_chunk), OF_SOMETHING_ELSE
    ),
    "a mean of the chunk's length": Mutant(
        around(eager_step, "pool_hidden", of_its_length), OF_SOMETHING_ELSE
    ),
    "pooled with the first chunk": Mutant(
        around(planning, "mark_logits", first_chunk), f"contradicts itself|{OF_SOMETHING_ELSE}"
    ),
    "vectors of neighbours": Mutant(
        around(output_tracker.OutputTracker, "_add_embeddings", of_a_neighbour), OF_SOMETHING_ELSE
    ),
    "hidden states not judged": Mutant(
        around(pooling, "find_pooled_health", unjudged), "pooled|error"
    ),
}
