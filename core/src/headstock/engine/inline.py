"""The executor that runs steps in this process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.engine.batch import Step, make_step
from headstock.engine.buffers import Buffers
from headstock.engine.router import PhaseRouter
from headstock.engine.sampling import SamplingTable
from headstock.schedule import Entry, Plan
from headstock.spi import Executor, Pending, Runner, Sample

Ints = np.ndarray


@frozen(kw_only=True, eq=False)
class Outcome:
    """What a step sampled, on the host.

    tokens, healthy, logprobs: [n], one entry a logit position; logprobs, top_ids and top_logprobs [n, k] are None
    when nobody asked
    rows, positions: [n] int64, where each logit was    last_logits: [rows of the plan], as in `Step`
    """

    tokens: Ints
    healthy: Ints
    logprobs: Ints | None
    top_ids: Ints | None
    top_logprobs: Ints | None
    rows: Ints
    positions: Ints
    last_logits: Ints


class Launched(Pending):
    """A step whose kernels have been launched."""

    def __init__(self, step: Step, sample: Sample, buffers: Buffers) -> None:
        self.step = step
        self.sample = sample
        self.buffers = buffers

    def wait(self) -> Outcome:
        """What was sampled; blocks until the device is done. The pages of rows that failed are finite afterwards."""
        sample = self.sample
        healthy = host(sample.healthy)
        if not healthy.all():
            self.buffers.clean(np.unique(self.step.logit_rows[~healthy]))
        return Outcome(
            tokens=host(sample.tokens),
            healthy=healthy,
            logprobs=None if sample.logprobs is None else host(sample.logprobs),
            top_ids=None if sample.top_ids is None else host(sample.top_ids),
            top_logprobs=None if sample.top_logprobs is None else host(sample.top_logprobs),
            rows=self.step.logit_rows,
            positions=self.step.logit_positions,
            last_logits=self.step.last_logits,
        )


def host(tensor: Tensor) -> Ints:
    """The tensor's values on the host."""
    return tensor.cpu().numpy()


class InlineExecutor(Executor):
    """Plans are carried out one after the other by `runner` over `buffers`."""

    def __init__(self, *, buffers: Buffers, runner: Runner, router: PhaseRouter, vocab: int) -> None:
        self.buffers = buffers
        self.runner = runner
        self.router = router
        self.sampling = SamplingTable(buffers.tokens.shape[0], vocab)

    @torch.inference_mode()
    def execute(self, plan: Plan, joined: Mapping[int, Entry]) -> Launched:
        """Launch `plan`; `joined` holds the requests that it seats, by row."""
        for row, entry in joined.items():
            self.sampling.join(row, entry.request)
        self.buffers.take_in(plan, {row: entry.tokens for row, entry in joined.items()})
        step = make_step(plan, self.buffers, self.sampling)
        sample = self.runner.run(step.batch, self.router.attend(step))
        self.keep(plan, step, sample)
        return Launched(step, sample, self.buffers)

    def keep(self, plan: Plan, step: Step, sample: Sample) -> None:
        """Write the sampled tokens to the token table, one past what was computed; a row at its end writes nothing."""
        samples = (plan.samples > 0) & (plan.stops < self.buffers.tokens.shape[1])
        if not samples.any():
            return
        rows, positions = plan.rows[samples].astype(np.int64), plan.stops[samples].astype(np.int64)
        tokens = sample.tokens
        if len(step.logit_rows) != len(rows):
            tokens = tokens[self.buffers.put(step.last_logits[samples])]
        native = self.buffers.native
        native(self.buffers.tokens)[native(rows), native(positions)] = native(tokens)

    def close(self) -> None:
        """Free the device."""
        self.runner.close()
        self.router.close()
        del self.buffers
