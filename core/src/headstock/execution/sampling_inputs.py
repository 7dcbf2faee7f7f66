"""The sampling settings of running requests, and their tensors for a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.logit_rules import LogitRules, make_logit_tables
from headstock.execution.processor_columns import ProcessorColumns
from headstock.execution.token_masks import MASK, MaskSource, TokenMasks
from headstock.scheduler import Request
from headstock.spi import LogitsProcessor, Sampling
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.execution.buffers import Buffers

_NEUTRAL_VALUES = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
}
"""Column -> its neutral value; the first three have columns on the device."""
_PENALTIES = {"repetition", "presence", "frequency"}


@frozen(eq=False)
class DeviceColumns:
    """The sampling settings that replayed steps read, one entry a row.

    floats: [3, rows] float32, temperature, top_p, min_p
    integers: [2, rows] int64, top_k, seeds
    """

    floats: Tensor
    integers: Tensor

    @classmethod
    def make_greedy(cls, rows: int, vocab: int, device: torch.device) -> DeviceColumns:
        """Make columns in which every row is greedy."""
        neutral = torch.tensor(list(_NEUTRAL_VALUES.values())[:3], device=device)[:, None].repeat(
            1, rows
        )
        integers = torch.zeros((2, rows), dtype=torch.int64, device=device)
        integers[0] = vocab
        return cls(neutral, integers)

    def gather(self, rows: Tensor, kind: frozenset[str]) -> dict[str, Tensor]:
        """Gather the settings that `kind` names and the seeds; none without a temperature, where
        they change nothing.

        rows: [n] int64
        """
        if "temperature" not in kind:
            return {}
        # A launch for all of them takes no longer than one for each that is asked for.
        floats, integers = self.floats[:, rows], self.integers[:, rows]
        columns = dict(
            zip(
                ("temperature", "top_p", "min_p", "top_k", "seeds"),
                (*floats, *integers),
                strict=True,
            )
        )
        return {name: columns[name] for name in columns if name in kind or name == "seeds"}


class SamplingTable:
    """The settings by row; a row is written when a request is admitted to it.

    columns: on the device; those of `stale_rows` are not uploaded yet
    uploaded: what the columns hold, [3, rows] float32 and [2, rows] int64
    logit_rules, rules_end: a row's rules, and the length from which they do nothing
    processors: what rows give logits processors
    masks: the tokens that rows may sample, where their answers follow a grammar; of
        `part_vocab` ids, where a rank has a part of the vocabulary
    """

    def __init__(
        self,
        rows: int,
        vocab: int,
        device: torch.device | str = "cpu",
        processors: Mapping[str, LogitsProcessor] | None = None,
        masks: MaskSource | None = None,
        max_drafts: int = 0,
        *,
        part_vocab: int = 0,
    ) -> None:
        self.vocab = vocab
        self.neutral = np.array(list(_NEUTRAL_VALUES.values()), np.float32)
        self.floats = self.neutral[:, None].repeat(rows, 1)
        self.active = np.zeros(self.floats.shape, bool)
        self.columns = DeviceColumns.make_greedy(rows, vocab, torch.device(device))
        self.processors = ProcessorColumns(processors or {}, rows, torch.device(device))
        self.masks = TokenMasks(
            masks,
            rows=rows,
            places=max_drafts + 1,
            vocab=part_vocab or vocab,
            device=torch.device(device),
        )
        self.stale_rows: set[int] = set()
        self.uploaded: tuple[Ints, Ints] = (
            self.floats[:3].copy(),
            np.array((vocab, 0), np.int64)[:, None].repeat(rows, 1),
        )
        self.top_k = np.full(rows, vocab, np.int64)
        self.seeds = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int64)
        self.prompt_lens = np.zeros(rows, np.int64)
        self.has_prompt_logprobs = np.zeros(rows, bool)
        self.logit_rules: dict[int, LogitRules] = {}
        self.rules_end = np.zeros(rows, np.int64)

    @property
    def rules(self) -> frozenset[str]:
        """What a kind of sampling may name beside settings."""
        return self.processors.rules | self.masks.rules

    def write_row(self, row: int, request: Request) -> None:
        """Write the request's settings to its row."""
        params: Any = request.params
        floats = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        self.floats[:, row] = [floats[name] for name in _NEUTRAL_VALUES]
        # Compared once, at admission: a step asks for all of its rows which settings matter.
        self.active[:, row] = self.floats[:, row] != self.neutral
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab else self.vocab
        self.seeds[row] = params.seed or 0
        counts = (params.logprobs, params.prompt_logprobs)
        self.logprobs[row] = max((count for count in counts if count is not None), default=-1)
        self.prompt_lens[row] = len(request.prompt)
        self.has_prompt_logprobs[row] = request.prompt_logprobs
        rules = LogitRules.from_request(request, self.vocab)
        self.rules_end[row] = rules.end_len
        if rules.end_len:
            self.logit_rules[row] = rules
        else:
            self.logit_rules.pop(row, None)
        self.processors.write_row(row, request.processor_values, is_greedy=params.temperature == 0)
        self.masks.clear_row(row)
        # Only replayed steps read the columns, so the upload waits for one and takes all rows
        # together.
        self.stale_rows.add(row)

    def select_kind(
        self, rows: Ints, positions: Ints, buffers: Buffers, places: Ints | None = None
    ) -> frozenset[str] | None:
        """Select the device's columns that matter for these rows, and upload what is stale.

        None when sampling needs more than columns: a captured graph reads these alone.

        rows, positions: [n] int64, of each logit
        places: [n] int64, where these are among the logits of a replay; None for the same places
        writes: columns
        """
        used = {
            name
            for name, is_used in zip(_NEUTRAL_VALUES, self._used_columns(rows), strict=True)
            if is_used
        }
        # A graph for each combination would cost memory and capture time; only the usual kinds have
        # one (docs/decisions/0015-replayed-decode-steps.md).
        if used & _PENALTIES or self.logprobs[rows].max(initial=-1) >= 0:
            return None
        if self._active_rules(rows, positions):
            return None
        if self.stale_rows:
            self._upload_rows([*self.stale_rows], buffers)
            self.stale_rows.clear()
        more = self.processors.select_kind(rows, buffers, places)
        if self.masks.is_active:
            more |= {MASK}
        # Without a temperature the other columns change nothing. A kind of their own would make
        # noise over the whole vocabulary for rows that are greedy.
        if "temperature" not in used:
            return more
        top_k = {"top_k"} if (self.top_k[rows] < self.vocab).any() else set()
        return more | used | top_k

    def _upload_rows(self, rows: list[int], buffers: Buffers) -> None:
        """Write the settings of these rows to the device.   writes: columns, uploaded"""
        new = np.array(rows, np.int64)
        values: tuple[Ints, Ints] = (
            self.floats[:3, new],
            np.stack((self.top_k[new], self.seeds[new])),
        )
        columns = self.columns.floats, self.columns.integers
        if len(rows) == 1:
            # As arguments of kernels, which need no transfer, and mostly the seed alone: an idle
            # engine's first token waits for this.
            for column, value, known in zip(columns, values, self.uploaded, strict=True):
                for k in (value[:, 0] != known[:, rows[0]]).nonzero()[0].tolist():
                    column[k, rows[0]].fill_(value[k, 0].item())
        else:
            at, *uploaded = buffers.to_device_packed(new, *values)
            for column, entries in zip(columns, uploaded, strict=True):
                column[:, at] = entries
        for known, value in zip(self.uploaded, values, strict=True):
            known[:, new] = value

    def gather(self, row_ids: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
        """Gather the settings that `kind` names, for the tokens that come to these positions.

        A graph may capture it.
        row_ids, positions: [n] int64
        """
        # Greedy rows skip the noise over the vocabulary.
        if not kind:
            return Sampling()
        columns: dict[str, Any] = self.columns.gather(row_ids, kind)
        return Sampling(
            **columns,
            positions=positions,
            mask=self.masks.gather(row_ids, positions, kind),
            processing=self.processors.gather(row_ids, kind),
        )

    def _active_rules(self, rows: Ints, positions: Ints) -> list[tuple[int, int, LogitRules]]:
        """Find the logits with rules, with the length of their row and its rules.

        Within the prompt no token is sampled, so rules do nothing there.

        rows, positions: [n] int64
        """
        if not self.logit_rules:
            return []
        lengths = positions + 1
        at = ((lengths >= self.prompt_lens[rows]) & (lengths < self.rules_end[rows])).nonzero()[0]
        entries = zip(at.tolist(), lengths[at].tolist(), rows[at].tolist(), strict=True)
        return [(i, length, self.logit_rules[row]) for i, length, row in entries]

    def _used_columns(self, rows: Ints) -> list[bool]:
        """Whether some of these rows differs from the neutral value, for each column."""
        used: list[bool] = np.logical_or.reduce(self.active.take(rows, axis=1), axis=1).tolist()
        return used

    def make_sampling(self, rows: Ints, positions: Ints, buffers: Buffers) -> Sampling:
        """Make the settings for logits of `rows` at token `positions`.

        Settings that no row uses are None: each one costs a kernel or more.

        rows, positions: [n] int64
        """
        floats = self.floats[:, rows]
        columns = zip(_NEUTRAL_VALUES, self._used_columns(rows), floats, strict=True)
        used: dict[str, Any] = {
            name: buffers.to_device(values) for name, is_used, values in columns if is_used
        }
        top_k = self.top_k[rows]
        if "temperature" not in used:
            used = {name: values for name, values in used.items() if name in _PENALTIES}
        else:
            # The noise of a token depends on its seed and its own position alone, so that it is
            # the same in any batch. The sampled token comes one past the scored position.
            used |= {
                "seeds": buffers.to_device(self.seeds[rows]),
                "positions": buffers.to_device(positions + 1),
            }
            if (top_k < self.vocab).any():
                used["top_k"] = buffers.to_device(top_k)
        if used.keys() & _PENALTIES:
            used |= self._penalty_inputs(
                rows, positions, buffers, dict(zip(_NEUTRAL_VALUES, floats, strict=True))
            )
        if rules := self._active_rules(rows, positions):
            used |= make_logit_tables(rules, (len(rows), self.vocab), buffers)
        if self.masks.is_active:
            # Within a prompt any token may follow; the last row of the tables is padding.
            is_output = positions + 1 >= self.prompt_lens[rows]
            free_row = len(self.top_k) - 1
            masked = np.where(is_output, rows, free_row)
            used["mask"] = self.masks.make_mask(masked, positions + 1, buffers)
        if processing := self.processors.make_processing(rows, buffers):
            used["processing"] = processing
            used.setdefault("positions", buffers.to_device(positions + 1))
        if self.has_prompt_logprobs[rows].any():
            used["targets"] = self._logprob_targets(rows, positions, buffers)
        return Sampling(**used, top_logprobs=int(self.logprobs[rows].max(initial=-1)))

    def _penalty_inputs(
        self, rows: Ints, positions: Ints, buffers: Buffers, floats: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Make the inputs of penalties: each row's tokens up to its position."""
        longest = int(positions.max()) + 1
        penalties = {
            name: buffers.to_device(floats[name])
            for name in ("repetition", "presence", "frequency")
        }
        return penalties | {
            # From the device's table: with overlap the latest token is nowhere else yet.
            "history": buffers.tokens[buffers.to_device(rows), :longest],
            "history_lens": buffers.to_device(positions + 1),
            "prompt_lens": buffers.to_device(self.prompt_lens[rows]),
        }

    def _logprob_targets(self, rows: Ints, positions: Ints, buffers: Buffers) -> Tensor:
        """Look up the prompt token after each scored position; -1 where it is yet to be sampled.

        returns: [n] int64
        """
        inside = self.has_prompt_logprobs[rows] & (positions + 1 < self.prompt_lens[rows])
        device_rows = buffers.to_device(rows)
        following = buffers.tokens[
            device_rows, buffers.to_device(np.where(inside, positions + 1, 0))
        ]
        return following.masked_fill(buffers.to_device(~inside), -1)
