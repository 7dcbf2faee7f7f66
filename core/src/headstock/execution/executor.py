"""The executor that runs steps in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.attention_router import PhaseRouter
from headstock.execution.batch import decode_step, make_step, prompt_step
from headstock.execution.buffers import Buffers
from headstock.execution.readback import Readback
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Plan, RequestState
from headstock.spi import Executor, Pending, Runner, Sample
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class Outcome:
    """What a step sampled, on the host.

    tokens, healthy, logprobs: [n], one entry a logit position; logprobs, top_ids and top_logprobs
    [n, k] are None when nobody asked
    rows, positions: [n] int64, where each logit was
    last_logits: [rows of the plan], as in `Step`
    """

    tokens: Ints
    healthy: Ints
    logprobs: Ints | None
    top_ids: Ints | None
    top_logprobs: Ints | None
    rows: Ints
    positions: Ints
    last_logits: Ints


@frozen(kw_only=True, eq=False)
class Launched(Pending):
    """A step whose kernels have been launched, and where its logits are; fields as in `Outcome`.

    page_tables: as they were for this step
    """

    readback: Readback
    buffers: Buffers
    page_tables: tuple[Tensor, ...]
    rows: Ints
    positions: Ints
    last_logits: Ints

    def wait(self) -> Outcome:
        """What was sampled; blocks until the device is done. The pages of rows that failed are
        finite afterwards.
        """
        told = self.readback.wait()
        healthy = told["healthy"]
        if not healthy.all():
            self.buffers.clean(np.unique(self.rows[~healthy]), self.page_tables)
        return Outcome(
            tokens=told["tokens"],
            healthy=healthy,
            logprobs=told.get("logprobs"),
            top_ids=told.get("top_ids"),
            top_logprobs=told.get("top_logprobs"),
            rows=self.rows,
            positions=self.positions,
            last_logits=self.last_logits,
        )


class InlineExecutor(Executor):
    """Plans are carried out one after the other by `runner` over `buffers`."""

    def __init__(
        self, *, buffers: Buffers, sampling: SamplingTable, runner: Runner, router: PhaseRouter
    ) -> None:
        self.buffers = buffers
        self.sampling = sampling
        self.runner = runner
        self.router = router
        self.owed: list[tuple[Plan, dict[int, Ints]]] = []  # what the tables have yet to take in

    @torch.inference_mode()
    def execute(self, plan: Plan, joined: Mapping[int, RequestState]) -> Launched:
        """Launch `plan`; `joined` holds the requests that it seats, by row."""
        with self.range(plan):
            self.owed.append((plan, {row: entry.tokens for row, entry in joined.items()}))
            self.take_in()
            for row, entry in joined.items():
                self.sampling.join(row, entry.request)
            return self.replay(plan) or self.replay_prompt(plan) or self.run(plan)

    def take_in(self) -> None:
        """Bring the tables up to date with this plan, and with those before it that failed here:
        the news of a plan concern rows that are not in it too, and a page that a table names
        wrongly is written to.
        """
        while self.owed:
            self.buffers.take_in(*self.owed[0])
            del self.owed[0]

    def range(self, plan: Plan) -> AbstractContextManager[None]:
        """A name for the step in the timelines of Nsight Systems and Nsight Compute."""
        if self.buffers.device.type != "cuda":
            return nullcontext()
        others = len(plan.rows) - plan.num_decode
        return torch.cuda.nvtx.range(
            f"step {plan.number}: {plan.num_decode} decode, {others} prefill"
        )

    def replay(self, plan: Plan) -> Launched | None:
        """The plan as a step that the runner has captured; None when it has not."""
        step = decode_step(plan, self.sampling, self.buffers)
        sample = None if step is None else self.runner.decode(step)
        if step is None or sample is None:
            return None
        return self.launched(sample, step.row_ids, step.positions, np.arange(len(step.row_ids)))

    def replay_prompt(self, plan: Plan) -> Launched | None:
        """The plan as a step with prompt tokens that the runner has captured; None when it has
        not.
        """
        step = prompt_step(plan, self.sampling, self.buffers, self.router.plan)
        sample = None if step is None else self.runner.prompt(step)
        if sample is None:
            return None
        rows, last = plan.rows.astype(np.int64), plan.stops.astype(np.int64) - 1
        return self.launched(sample, rows, last, np.arange(len(rows)))

    def run(self, plan: Plan) -> Launched:
        """The plan as a batch of its own."""
        step = make_step(plan, self.buffers, self.sampling)
        sample = self.runner.run(step.batch, self.router.attend(step))
        samples = plan.samples > 0
        if samples.any():
            tokens = sample.tokens
            if len(step.logit_rows) != int(samples.sum()):
                tokens = tokens[self.buffers.put(step.last_logits[samples])]
            self.buffers.keep(plan.rows[samples], plan.stops[samples], tokens)
        return self.launched(sample, step.logit_rows, step.logit_positions, step.last_logits)

    def launched(self, sample: Sample, rows: Ints, positions: Ints, last_logits: Ints) -> Launched:
        """The step whose sample is on its way to the host."""
        return Launched(
            readback=Readback(sample, self.buffers.device),
            buffers=self.buffers,
            page_tables=self.buffers.launched_tables(),
            rows=rows,
            positions=positions,
            last_logits=last_logits,
        )

    def close(self) -> None:
        """Free the device; a second call frees what an interrupted one left."""
        held = vars(self)
        for name in ("runner", "router"):
            if name in held:
                held.pop(name).close()
        for name in ("buffers", "sampling"):
            held.pop(name, None)
