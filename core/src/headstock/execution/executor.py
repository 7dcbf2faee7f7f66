"""The executor that runs steps in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from attrs import fields_dict, frozen
from torch import Tensor

from headstock.errors import PluginBroken, describe_type
from headstock.execution.abstract_executor import NO_REASONS, Executor, Pending
from headstock.execution.attention_router import PhaseRouter
from headstock.execution.batch import make_decode_step, make_prompt_step, make_step
from headstock.execution.buffers import Buffers
from headstock.execution.pooling import PoolingTable, find_pooled_health
from headstock.execution.prefix_tracker import GroupedRows, PrefixTracker, keep_prompts, sort_rows
from headstock.execution.readback import Readback
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.step_watch import StepWatch
from headstock.execution.verification import (
    find_verified,
    list_stored_samples,
    make_verify_step,
)
from headstock.scheduler import Plan, RequestState
from headstock.spi import PrefixGroups, Runner, Sample
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class LaunchedStep(Pending):
    """A step whose kernels have been launched.

    page_tables: as they were for this step
    order: [logits] int64, which of the sampled positions each of the plan's logits is; None for
        the same order
    """

    readback: Readback
    buffers: Buffers
    page_tables: tuple[Tensor, ...]
    plan: Plan
    order: Ints | None
    is_replayed: bool
    reasons: Mapping[int, str]

    def wait(self) -> Sample:
        """Wait for the sample; afterwards the pages of unhealthy rows are finite."""
        sample = self.readback.wait()
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


def _find_sample_fault(sample: object, num_rows: int, num_logits: int) -> str:
    """What a runner returned that is no sample of a plan; empty for one."""
    wanted = f"for {num_rows} rows; wanted a token for each"
    if not isinstance(sample, Sample):
        return f"{describe_type(sample)} {wanted}"
    tokens: object = sample.tokens
    healthy: object = sample.healthy
    if not isinstance(tokens, Tensor) or not isinstance(healthy, Tensor):
        found = f"{describe_type(tokens)} and {describe_type(healthy)}"
        return f"{found} as tokens and healthy; wanted two tensors"
    if tokens.dtype not in (torch.int64, torch.int32) or healthy.dtype != torch.bool:
        found = f"{tokens.dtype} and {healthy.dtype}"
        return f"{found} as tokens and healthy; wanted torch.int64 and torch.bool"
    if tokens.shape != healthy.shape:
        return f"{list(tokens.shape)} tokens and {list(healthy.shape)} healthy flags {wanted}"
    if sample.logprobs is not None and sample.ranks is None:
        return "log-probabilities without ranks; score_and_sample of headstock.nn gives both"
    # Rows that are pooled are not scored.
    return f"{len(tokens)} tokens {wanted}" if len(tokens) < min(num_rows, num_logits) else ""


def _restore_order(sample: Sample, order: Ints) -> Sample:
    """Return the sampled positions in this order, those that it leaves out dropped."""
    tensors = {name: getattr(sample, name) for name in fields_dict(Sample) if name != "pooled"}
    ordered = {name: tensor[order] for name, tensor in tensors.items() if tensor is not None}
    return Sample(**ordered, pooled=sample.pooled)


class LocalExecutor(Executor):
    """Runs plans one after the other with `runner` over `buffers`, in this process.

    With a `tracker`, decode rows that share leading pages run side by side, in an order that the
    caller does not see.
    """

    def __init__(
        self,
        *,
        buffers: Buffers,
        sampling: SamplingTable,
        pooling: PoolingTable,
        runner: Runner,
        router: PhaseRouter,
        tracker: PrefixTracker | None = None,
        max_drafts: int = 0,
        watch: StepWatch | None = None,
    ) -> None:
        self.watch = watch
        self.tracker = tracker
        self.max_drafts = max_drafts
        self.buffers = buffers
        self.sampling = sampling
        self.pooling = pooling
        self.runner = runner
        self.router = router
        # Plans that the tables do not contain yet, with the tokens of their new rows.
        self.pending_plans: list[tuple[Plan, dict[int, Ints]]] = []

    @torch.inference_mode()
    def execute(self, plan: Plan, new_rows: Mapping[int, RequestState]) -> LaunchedStep:
        """Launch `plan`; `new_rows` are the requests that it admits, by row."""
        if self.watch is not None:
            self.watch.begin(plan)
        with self._nvtx_range(plan):
            tokens = {row: entry.tokens for row, entry in new_rows.items()}
            self.pending_plans.append((plan, tokens))
            self._apply_pending_plans()
            for row, entry in new_rows.items():
                self.sampling.write_row(row, entry.request)
                self.pooling.write_row(row, entry.request)
            self.sampling.processors.upload_forward_columns(self.buffers)
            self.sampling.masks.plan(plan, self.buffers)
            if len(plan.drafts):
                return self._launch_verification(plan)
            grouped = self._group_rows(plan)
            if grouped is None:
                return self._launch_readback(*self._launch(plan, None), plan, None)
            if grouped.is_sorted:
                return self._launch_readback(*self._launch(plan, grouped.groups), plan, None)
            count = len(plan.rows)
            order, place = (keep_prompts(each, count) for each in (grouped.order, grouped.place))
            launched = self._launch(sort_rows(plan, order), grouped.groups)
            # Rows beside groups have one logit each.
            return self._launch_readback(*launched, plan, place)

    def _group_rows(self, plan: Plan) -> GroupedRows | None:
        """Group the rows that decode, where the step reads the pages that they share once."""
        if self.tracker is None:
            return None
        return self.tracker.group_plan(plan, is_whole=self._uses_groups(plan))

    def _uses_groups(self, plan: Plan) -> bool:
        """Whether the runner replays a plan with prompts as a graph that reads groups."""
        # A group has two rows.
        if not self._may_replay or not 1 < plan.num_decode < len(plan.rows):
            return False
        num_tokens, longest = int((plan.stops - plan.starts).sum()), int(plan.stops.max())
        is_scored_once = bool((plan.num_logits == 1).all())
        return is_scored_once and self.runner.uses_groups(len(plan.rows), num_tokens, longest)

    def _launch(self, plan: Plan, groups: PrefixGroups | None) -> tuple[Sample, bool]:
        """Launch a plan whose rows stand group by group, where there are groups.

        returns: what it samples, and whether it was a replay
        """
        # A replay where there is one: operation by operation a step of the 0.6B shape has 324
        # launches, which take the host 7 ms (docs/decisions/0016-replayed-prompt-steps.md).
        if self._may_replay:
            replayed = self._replay_decode(plan, groups) or self._replay_prompt(plan, groups)
            if replayed is not None:
                self._check_sample(replayed, len(plan.rows), int(plan.num_logits.sum()))
                return replayed, True
        return self._run_batch(plan, groups), False

    @property
    def _may_replay(self) -> bool:
        """Whether a runner is offered steps to replay: their calls cannot be watched."""
        return self.watch is None or not self.watch.needs_calls

    def _check_sample(self, sample: object, num_rows: int, num_logits: int) -> None:
        """Raise PluginBroken when a runner returned something that is no sample of a step.

        The host looks at types and shapes alone.
        """
        fault = _find_sample_fault(sample, num_rows, num_logits)
        if fault:
            runner = type(self.runner)
            raise PluginBroken(
                f"the runner {runner.__module__}.{runner.__qualname__} returned {fault}"
            )

    def _launch_verification(self, plan: Plan) -> LaunchedStep:
        """Launch a plan in which some rows verify drafts."""
        step = None
        if self._may_replay:
            step = make_verify_step(plan, self.sampling, self.buffers, self.max_drafts + 1)
        sample = None if step is None else self.runner.decode(step)
        if step is None or sample is None:
            return self._launch_readback(*self._launch(plan, None), plan, None)
        self._check_sample(sample, len(plan.rows), len(plan.rows) * step.query_len)
        return self._launch_readback(sample, True, plan, find_verified(plan, step.query_len))

    def _apply_pending_plans(self) -> None:
        """Bring the tables up to date with this plan and with earlier ones that failed here.

        A failed plan's table entries still count: they also concern rows that are not in it, and a
        stale entry would make a later step write to another row's page.
        """
        while self.pending_plans:
            self.buffers.apply_plan(*self.pending_plans[0])
            if self.tracker is not None:
                self.tracker.apply_plan(*self.pending_plans[0])
            del self.pending_plans[0]  # only now: an exception above leaves it for the next step

    def _nvtx_range(self, plan: Plan) -> AbstractContextManager[None]:
        """Name the step in the timelines of Nsight Systems and Nsight Compute."""
        if self.buffers.device.type != "cuda":
            return nullcontext()
        others = len(plan.rows) - plan.num_decode
        return torch.cuda.nvtx.range(
            f"step {plan.number}: {plan.num_decode} decode, {others} prefill"
        )

    def _replay_decode(self, plan: Plan, groups: PrefixGroups | None) -> Sample | None:
        """Replay the plan as a captured decode step; None when the runner has none for it."""
        step = make_decode_step(plan, self.sampling, self.buffers, groups)
        return None if step is None else self.runner.decode(step)

    def _replay_prompt(self, plan: Plan, groups: PrefixGroups | None) -> Sample | None:
        """Replay the plan as a captured prompt step; None when the runner has none for it."""
        step = make_prompt_step(plan, self.sampling, self.buffers, self.router.plan, groups)
        return None if step is None else self.runner.prompt(step)

    def _run_batch(self, plan: Plan, groups: PrefixGroups | None) -> Sample:
        """Run the plan as a batch of its own."""
        pooling = self.pooling.make_pooling(plan, self.buffers)
        step = make_step(plan, self.buffers, self.sampling, groups, pooling)
        sample = self.runner.run(step.batch, self.router.attend(step))
        self._check_sample(sample, len(plan.rows), int(plan.num_logits.sum()))
        self.pooling.check_pooled(plan, sample)
        is_sampled = plan.samples > 0
        if is_sampled.any():
            if len(plan.drafts):
                rows, positions, at = list_stored_samples(plan)
                tokens = sample.tokens[self.buffers.to_device(at)]
                self.buffers.store_tokens(rows, positions, tokens)
                return sample
            tokens = sample.tokens
            # Rows in the middle of their prompt are scored too, for NaN alone; those tokens are no
            # tokens of the row (docs/decisions/0011-scored-chunks.md).
            if len(tokens) != int(is_sampled.sum()):
                tokens = tokens[self.buffers.to_device(plan.last_logits[is_sampled])]
            self.buffers.store_tokens(plan.rows[is_sampled], plan.stops[is_sampled], tokens)
        return sample

    def _launch_readback(
        self, sample: Sample, is_replayed: bool, plan: Plan, order: Ints | None
    ) -> LaunchedStep:
        """Queue the sample's copies to the host right behind the step."""
        if self.sampling.masks.pending is not None:
            raise PluginBroken(
                f"the runner {type(self.runner).__name__} sampled before prepare_sampling() was "
                "called; report it to its author or use --runner eager"
            )
        reasons: Mapping[int, str] = NO_REASONS
        if self.watch is not None:
            reasons = self.watch.judge(sample, plan, is_replayed=is_replayed)
        return LaunchedStep(
            readback=Readback(sample, self.buffers.device),
            buffers=self.buffers,
            # Now and not when NaN is found: by then the next plan may have given these rows to
            # others.
            page_tables=self.buffers.snapshot_page_tables(),
            plan=plan,
            order=order,
            is_replayed=is_replayed,
            reasons=reasons,
        )

    @torch.inference_mode()
    def capture_next(self) -> int:
        """Capture one graph of the runner's; return how many sizes are still without."""
        return self.runner.capture_next()

    def close(self) -> None:
        """Free the device; a second call frees what an interrupted one left."""
        # The attributes go too: an error or a caller that still refers to this executor would else
        # keep the pool alive.
        attributes = vars(self)
        for name in ("runner", "router"):
            if name in attributes:
                attributes.pop(name).close()
        if attributes.get("watch") is not None:
            attributes.pop("watch").close()
        for name in ("buffers", "sampling", "pooling", "tracker"):
            attributes.pop(name, None)
