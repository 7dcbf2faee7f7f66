"""What debug flags know of the step that runs, and what they find out about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from headstock.errors import PluginBroken, describe_type
from headstock.execution.step_watch import StepWatch
from headstock.logs import log_event
from headstock.spi import Batch, Sample, Step

LOG = logging.getLogger(__name__)

NONE: Mapping[int, str] = MappingProxyType({})


class DebugWatch(StepWatch):
    """The running step of an executor under debug flags.

    ops, runner: names of the plugins
    vocab: how many token ids there are
    table: the token table, [rows, positions] int64
    before: as the table was when the step began
    is_on: steps are watched; a profile run over two pages and captures are not
    num_steps: how many steps have begun
    results: in their order, operations and layers with the rows of their results' tokens, and a
        sum of each token's numbers
    """

    def __init__(self, ops: str, runner: str, vocab: int, table: Tensor) -> None:
        self.ops = ops
        self.runner = runner
        self.vocab = vocab
        self.table = table
        self.before = table
        self.is_on = False
        self.is_running = False
        self.num_steps = 0
        self.results: list[tuple[str, Tensor, Tensor]] = []
        self.sampled: list[Sample] = []
        self.num_calls = 0
        self.largest_error = 0.0

    def begin(self, step: Step) -> None:
        """Forget the step before."""
        self.results, self.sampled = [], []
        self.num_steps += 1
        self.is_running = self.is_on
        if self.is_on:
            self.before = self.table.clone()

    def note_result(self, result: Tensor, batch: Batch, what: str) -> None:
        """Note the result of an operation.

        result: [tokens, ...]
        """
        # Sums and not a look at each number: they are not finite where a number is not, and are
        # looked at all at once, at the end of the step.
        rows = batch.token_rows[: len(result)]
        numbers = result[: len(rows)].flatten(1)
        self.results.append((what, rows, numbers.sum(1, dtype=torch.float32)))

    def _find_first_non_finite(self) -> dict[int, str]:
        """By row, the operation and the layer whose result was not finite first."""
        first: dict[int, str] = {}
        if not self.results:
            return first
        if bool(torch.cat([sums for _, _, sums in self.results]).isfinite().all()):
            return first
        for what, rows, sums in self.results:
            for row in rows[~sums.isfinite()].tolist():
                first.setdefault(row, what)
        return first

    def judge(self, sample: Sample, step: Step) -> Mapping[int, str]:
        """Check the step's sample.   raises: PluginBroken"""
        if not self.is_running:
            return NONE
        self.is_running = False
        who = f"the runner {self.runner!r}"
        if not isinstance(sample, Sample):
            raise PluginBroken(f"{who}: expected a Sample, got {describe_type(sample)}")
        tokens, healthy, count = sample.tokens, sample.healthy, int(step.num_logits.sum())
        # A replay that verifies drafts is padded to the same count in every row.
        has_count = len(tokens) >= count if sample.is_replayed else len(tokens) == count
        if tokens.shape != healthy.shape or tokens.dim() != 1 or not has_count:
            raise PluginBroken(
                f"{who} returned {list(tokens.shape)} tokens and {list(healthy.shape)} healthy "
                f"flags, and {count} positions are sampled"
            )
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab:
            wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            raise PluginBroken(
                f"the ops plugin {self.ops!r} sampled the token {wrong}, which is not in the "
                f"vocabulary of {self.vocab}"
            )
        self._compare_with_operations(sample, who)
        self._compare_stored(sample, step, who)
        return {
            row: f"the logits of this request are not finite: first {what} was not"
            for row, what in self._find_first_non_finite().items()
        }

    def _compare_with_operations(self, sample: Sample, who: str) -> None:
        """Raise PluginBroken when a runner returns something else than the operations sampled."""
        if not self.sampled or sum(len(each.tokens) for each in self.sampled) != len(sample.tokens):
            return  # a runner may pad, or sample by itself
        tokens = torch.cat([each.tokens for each in self.sampled])
        if not torch.equal(tokens, sample.tokens):
            at = int((tokens != sample.tokens).nonzero()[0])
            raise PluginBroken(
                f"{who} returned the token {int(sample.tokens[at])} at logit {at}, where the "
                f"operations sampled {int(tokens[at])}"
            )
        sick = ~torch.cat([each.healthy for each in self.sampled]) & sample.healthy
        if bool(sick.any()):
            raise PluginBroken(
                f"{who} called logit {int(sick.nonzero()[0])} healthy, which the operations did not"
            )

    def _compare_stored(self, sample: Sample, step: Step, who: str) -> None:
        """Raise PluginBroken when the token table has something else than was sampled."""
        before, after = self.before.cpu().numpy(), self.table.cpu().numpy()
        rows, positions, which = step.list_stored()
        sampled = sample.tokens.cpu().numpy()
        wanted = (sampled if sample.order is None else sampled[sample.order])[which]
        for at in (after[rows, positions] != wanted).nonzero()[0][:1].tolist():
            row, position = rows[at], positions[at]
            raise PluginBroken(
                f"{who} sampled the token {wanted[at]} for row {row} at position {position}, and "
                f"the token table has {after[row, position]}; RowTables.keep stores it"
            )
        changed = after != before
        changed[-1] = False  # the padding row
        # Behind a row's newest token anything may lie: it is written before it is read.
        ends = step.stops if step.num_drafts is None else step.stops - step.num_drafts
        for row, end in zip(step.row_ids[step.is_sampled], ends[step.is_sampled], strict=True):
            changed[row, end:] = False
        for row, position in zip(*(each[:1] for each in changed.nonzero()), strict=True):
            raise PluginBroken(
                f"{who} stored the token {after[row, position]} for row {row} at position "
                f"{position}, where {before[row, position]} was known; Step.list_stored says which "
                "samples become tokens"
            )

    def close(self) -> None:
        """Log how many calls of attention were compared, and the largest error."""
        if self.num_calls:
            facts = {"calls": self.num_calls, "largest_error": self.largest_error}
            LOG.info(log_event("attention agreed with the float32 reference", **facts))
