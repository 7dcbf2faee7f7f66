"""The executor that runs steps in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from attrs import fields_dict, frozen
from torch import Tensor

from headstock.errors import PluginBroken, describe_type
from headstock.execution.abstract_executor import NO_REASONS, Executor, Pending
from headstock.execution.buffers import Buffers
from headstock.execution.pooling import find_pooled_health
from headstock.execution.readback import Readback
from headstock.execution.step import PlannedStep, StepMaker
from headstock.execution.step_watch import StepWatch
from headstock.scheduler import Plan, RequestState
from headstock.spi import Runner, Sample
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class LaunchedStep(Pending):
    """A step whose kernels have been launched.

    page_tables: as they were for this step
    order: as in `Sample`
    drafts: None where the model's own layers make none
    """

    readback: Readback
    drafts: Readback | None
    buffers: Buffers
    page_tables: tuple[Tensor, ...]
    plan: Plan
    order: Ints | None
    is_replayed: bool
    has_drafts: bool
    reasons: Mapping[int, str]

    @property
    def is_done(self) -> bool:
        """Whether the sample has been copied."""
        return self.readback.is_done

    def wait(self) -> Sample:
        """Wait for the sample; afterwards the pages of unhealthy rows are finite."""
        copies: Mapping[str, Any] = self.readback.wait()
        sample = Sample(**copies)
        if self.order is not None:
            sample = _restore_order(sample, self.order)
        # The host learns of unhealthy rows only here: a look at the launch would wait for the
        # device. Meanwhile the next step may have changed the tables, so this step's are used.
        is_pooled_healthy = find_pooled_health(sample)
        if not (sample.healthy.all() and is_pooled_healthy.all()):
            rows = self.plan.rows.astype(np.int64)
            logit_rows = np.repeat(rows, self.plan.num_logits)[~sample.healthy.numpy()]
            pooled_rows = rows[self.plan.pooled_rows][~is_pooled_healthy]
            unhealthy = np.unique(np.concatenate((logit_rows, pooled_rows)))
            self.buffers.zero_non_finite(unhealthy, self.page_tables)
        return sample

    def wait_drafts(self) -> Tensor:
        """See `Pending.wait_drafts`."""
        assert self.drafts is not None, "has_drafts says whether there are any"
        return self.drafts.wait()["drafts"]


def _find_sample_fault(sample: object, plan: Plan) -> str:
    """Describe why a runner's result is not a sample of the plan; empty when it is one."""
    num_rows, num_logits = len(plan.rows), int(plan.num_logits.sum())
    expected = f"expected a token for each of {num_rows} rows, got"
    if not isinstance(sample, Sample):
        return f"{expected} {describe_type(sample)}"
    tokens: object = sample.tokens
    healthy: object = sample.healthy
    if not isinstance(tokens, Tensor) or not isinstance(healthy, Tensor):
        found = f"{describe_type(tokens)} and {describe_type(healthy)}"
        return f"expected two tensors as tokens and healthy, got {found}"
    if tokens.dtype not in (torch.int64, torch.int32) or healthy.dtype != torch.bool:
        found = f"{tokens.dtype} and {healthy.dtype}"
        return f"expected torch.int64 and torch.bool as tokens and healthy, got {found}"
    if tokens.shape != healthy.shape:
        return f"{expected} {list(tokens.shape)} tokens and {list(healthy.shape)} healthy flags"
    if sample.logprobs is not None and sample.ranks is None:
        return (
            "expected ranks with log-probabilities, got none; score_and_sample of headstock.nn "
            "gives both"
        )
    count = len(tokens)
    if sample.order is not None:
        if len(sample.order) != num_logits or int(sample.order.max(initial=0)) >= max(count, 1):
            return f"{expected} an order of {len(sample.order)} among {count} tokens"
        count = num_logits
    # Rows that are pooled are not scored.
    return f"{expected} {count} tokens" if count < min(num_rows, num_logits) else ""


def _restore_order(sample: Sample, order: Ints) -> Sample:
    """Return the sampled positions in this order, those that it leaves out dropped."""
    tensors = {name: getattr(sample, name) for name in fields_dict(Sample)}
    pooled = tensors.pop("pooled")
    ordered: dict[str, Any] = {
        name: tensor[order] for name, tensor in tensors.items() if isinstance(tensor, Tensor)
    }
    return Sample(**ordered, pooled=pooled)


class LocalExecutor(Executor):
    """Runs the steps of plans one after the other with `runner`, in this process."""

    def __init__(self, *, steps: StepMaker, runner: Runner, watch: StepWatch | None = None) -> None:
        self.steps = steps
        self.runner = runner
        self.watch = watch
        # Plans that the tables do not contain yet, with the tokens of their new rows.
        self.pending_plans: list[tuple[Plan, dict[int, Ints]]] = []

    @torch.inference_mode()
    def execute(self, plan: Plan, new_rows: Mapping[int, RequestState]) -> LaunchedStep:
        """Launch `plan`; `new_rows` are the requests that it admits, by row."""
        steps = self.steps
        with self._nvtx_range(plan):
            tokens = {row: entry.tokens for row, entry in new_rows.items()}
            self.pending_plans.append((plan, tokens))
            self._apply_pending_plans()
            for row, entry in new_rows.items():
                steps.sampling.write_row(row, entry.request)
                steps.pooling.write_row(row, entry.request)
            steps.sampling.processors.upload_forward_columns(steps.buffers)
            steps.sampling.masks.plan(plan, steps.buffers)
            step = steps.make_step(plan)
            if self.watch is not None:
                self.watch.begin(step)
            sample = self.runner.run(step)
            self._check_sample(sample, plan)
            return self._launch_readback(sample, step)

    def _check_sample(self, sample: object, plan: Plan) -> None:
        """Raise PluginBroken unless the runner returned a sample of the plan.

        The host looks at types and shapes alone.
        """
        fault = _find_sample_fault(sample, plan)
        if fault:
            runner = type(self.runner)
            raise PluginBroken(f"the runner {runner.__module__}.{runner.__qualname__}: {fault}")

    def _apply_pending_plans(self) -> None:
        """Bring the tables up to date with this plan and with earlier ones that failed here.

        A failed plan's table entries still count: they also concern rows that are not in it, and a
        stale entry would make a later step write to another row's page.
        """
        while self.pending_plans:
            self.steps.buffers.apply_plan(*self.pending_plans[0])
            if self.steps.tracker is not None:
                self.steps.tracker.apply_plan(*self.pending_plans[0])
            del self.pending_plans[0]  # only now: an exception above leaves it for the next step

    def _nvtx_range(self, plan: Plan) -> AbstractContextManager[None]:
        """Name the step in the timelines of Nsight Systems and Nsight Compute."""
        if self.steps.buffers.device.type != "cuda":
            return nullcontext()
        others = len(plan.rows) - plan.num_decode
        return torch.cuda.nvtx.range(
            f"step {plan.number}: {plan.num_decode} decode, {others} prefill"
        )

    def _launch_readback(self, sample: Sample, step: PlannedStep) -> LaunchedStep:
        """Queue the sample's copies to the host right behind the step."""
        steps, plan = self.steps, step.plan
        steps.pooling.check_pooled(plan, sample)
        if steps.sampling.masks.pending is not None:
            raise PluginBroken(
                f"the runner {type(self.runner).__name__} sampled before prepare_sampling() was "
                "called; report it to its author, or set runner (--runner) to eager"
            )
        reasons: Mapping[int, str] = NO_REASONS
        if self.watch is not None:
            reasons = self.watch.judge(sample, step)
        readback, drafts = Readback.of_sample(sample, steps.buffers.device), None
        # Behind the copies, so that the host plans the next step while drafts are made.
        if sample.make_drafts is not None:
            drafts = Readback({"drafts": sample.make_drafts()}, steps.buffers.device)
        return LaunchedStep(
            readback=readback,
            drafts=drafts,
            has_drafts=drafts is not None,
            buffers=steps.buffers,
            # Now and not when NaN is found: by then the next plan may have given these rows to
            # others.
            page_tables=steps.buffers.snapshot_page_tables(),
            plan=plan,
            order=sample.order,
            is_replayed=sample.is_replayed,
            reasons=reasons,
        )

    @torch.inference_mode()
    def prepare_next(self) -> int:
        """Capture one graph of the runner's; return how many sizes are still without."""
        return self.runner.prepare_next()

    def close(self) -> None:
        """Free the device; a second call frees what an interrupted one left."""
        # The attributes go too: an error or a caller that still refers to this executor would else
        # keep the pool alive.
        attributes = vars(self)
        if "runner" in attributes:
            attributes.pop("runner").close()
        if "steps" in attributes:
            self.steps.router.close()
            del self.steps
        if attributes.get("watch") is not None:
            attributes.pop("watch").close()
