"""What requests give logits processors: a column an argument, on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headstock.spi import LogitsProcessor, Processing, RowColumns
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.execution.buffers import Buffers

FEW_ROWS = 8
"""Up to this many logits of a step are processed separately; above it, all logits of the step."""

FEW, ALL = "few_processed", "processed"
"""The names that a `kind` of sampling has where a step's logits are processed."""

ProcessorValues = Sequence[Mapping[str, Any] | None]
"""By processor, the values of a request's columns; None where all are neutral."""


class ProcessorColumns:
    """The columns of logits processors, one entry a row of the tables.

    names: of the processors
    host, device: by processor and name, [rows] or [rows, width]; the device's lack `stale_rows`
    row_columns: those of `device` that operations may read
    is_used: [processors, rows] bool, where a row's logits are processed
    has_values: [processors, rows] bool, where a row's columns are not neutral
    chosen: [2, FEW_ROWS] int64 on the device, which logits a replay processes and whose rows they
        are, the first ones again where there are fewer
    few: as `device`, of the chosen rows alone; older than `device` while `is_few_stale`
    """

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], rows: int, device: torch.device
    ) -> None:
        self.names = tuple(processors)
        self.processors = tuple(processors.values())
        self.host: list[dict[str, np.ndarray]] = [
            {
                name: np.full(
                    (rows, column.width) if column.width else rows, column.neutral, column.dtype
                )
                for name, column in processor.columns.items()
            }
            for processor in self.processors
        ]
        self.device = [
            {name: torch.from_numpy(values).to(device, copy=True) for name, values in each.items()}
            for each in self.host
        ]
        self.row_columns = RowColumns(
            tables={
                name: {
                    column: table
                    for column, table in tables.items()
                    if processor.columns[column].in_forward
                }
                for name, processor, tables in zip(
                    self.names, self.processors, self.device, strict=True
                )
            }
        )
        self.is_used = np.zeros((len(self.processors), rows), bool)
        self.has_values = np.zeros_like(self.is_used)
        self.stale_rows: set[int] = set()
        self.is_few_stale = False
        self.chosen = torch.zeros((2, FEW_ROWS), dtype=torch.int64, device=device)
        self.last_chosen = np.zeros((2, FEW_ROWS), np.int64)
        self.few = [
            {name: column[:1].repeat_interleave(FEW_ROWS, 0) for name, column in each.items()}
            for each in self.device
        ]

    @property
    def rules(self) -> frozenset[str]:
        """What a kind of sampling names where a step's logits are processed."""
        return frozenset({FEW, ALL} if self.processors else ())

    def write_row(self, row: int, values: ProcessorValues, *, is_greedy: bool) -> None:
        """Write a request's values to its row."""
        for number, processor in enumerate(self.processors):
            arguments = values[number] if values else None
            # What leaves the best token in its place changes nothing for a greedy row.
            is_used = arguments is not None and (processor.changes_argmax or not is_greedy)
            self.is_used[number, row] = is_used
            # Operations read the values of rows whose logits stay as they are, too.
            given = {
                name: value
                for name, value in (arguments or {}).items()
                if is_used or processor.columns[name].in_forward
            }
            if not given and not self.has_values[number, row]:
                continue
            self.has_values[number, row] = bool(given)
            self.stale_rows.add(row)
            for name, column in processor.columns.items():
                self.host[number][name][row] = given.get(name, column.neutral)

    def find_processed(self, rows: Ints) -> Ints:
        """Find which of these logits are processed.   rows, returns: [n], [m] int64"""
        if not self.processors:
            return np.zeros(0, np.int64)
        is_processed: np.ndarray = np.logical_or.reduce(self.is_used.take(rows, axis=1), axis=0)
        return is_processed.nonzero()[0]

    def select_kind(self, rows: Ints, buffers: Buffers, places: Ints | None) -> frozenset[str]:
        """Select what a replay of these logits does, and bring the device up to date.

        rows: [n] int64
        places: [n] int64, where they are among the logits of the replay; None for the same places
        writes: device, chosen, few
        """
        if not self.processors:
            return frozenset()
        is_new = self.is_few_stale or bool(self.stale_rows)
        self.is_few_stale = False
        self._upload(buffers)
        which = self.find_processed(rows)
        is_few = len(which) <= FEW_ROWS
        # Always valid for the logits of this step: a graph may process some though none asks for
        # it, and what is left of a larger step would be past its end. Where none asks, the columns
        # of each row are neutral.
        few = which if is_few and len(which) else np.zeros(1, np.int64)
        few = np.pad(few, (0, FEW_ROWS - len(few)), constant_values=few[0])
        chosen = np.stack((few if places is None else places[few], rows[few]))
        # In steady decoding the same rows are processed step after step.
        if (chosen != self.last_chosen).any():
            self.last_chosen = chosen
            self.chosen.copy_(buffers.to_device(chosen))
            is_new = True
        if is_new:
            self.gather_few_()
        if not len(which):
            return frozenset()
        return frozenset({FEW if is_few else ALL})

    def upload_forward_columns(self, buffers: Buffers) -> None:
        """Bring what operations read up to date, before a step is launched.   writes: device"""
        if self.stale_rows and any(self.row_columns.tables.values()):
            self._upload(buffers)
            self.is_few_stale = True

    def _upload(self, buffers: Buffers) -> None:
        """Bring the device's columns up to date.   writes: device"""
        if not self.stale_rows:
            return
        new = np.fromiter(self.stale_rows, np.int64, len(self.stale_rows))
        names = [(i, name) for i, each in enumerate(self.host) for name in each]
        values = (self.host[i][name][new] for i, name in names)
        at, *columns = buffers.to_device_packed(new, *values)
        for (i, name), column in zip(names, columns, strict=True):
            self.device[i][name][at] = column
        self.stale_rows.clear()

    def gather_few_(self) -> None:
        """Gather the columns of the chosen rows, which are the same step after step.

        Replays read them as they are: a kernel a column would keep the rows' processors waiting.

        writes: few
        """
        for columns, few in zip(self.device, self.few, strict=True):
            for name, column in columns.items():
                torch.index_select(column, 0, self.chosen[1], out=few[name])

    def gather(self, row_ids: Tensor, kind: frozenset[str]) -> Processing | None:
        """Gather the processing of a replay's logits; a graph may capture it.

        row_ids: [n] int64
        """
        if FEW not in kind and ALL not in kind:
            return None
        if ALL in kind:
            which, count = None, len(row_ids)
            tables = [
                {name: column[row_ids] for name, column in columns.items()}
                for columns in self.device
            ]
        else:
            # A capture may follow a step of more rows than it has, whose rows are chosen still.
            which = self.chosen[0, : len(row_ids)].clamp(max=len(row_ids) - 1)
            tables, count = self.few, len(which)
        return Processing(
            rows=which,
            parts=tuple(
                (processor, {name: column[:count] for name, column in columns.items()})
                for processor, columns in zip(self.processors, tables, strict=True)
            ),
        )

    def make_processing(self, rows: Ints, buffers: Buffers) -> Processing | None:
        """Make the processing of these logits; None when none is processed.   rows: [n] int64"""
        which = self.find_processed(rows)
        if not len(which):
            return None
        # Without columns for which no row here has a value.
        is_needed: np.ndarray = np.logical_or.reduce(self.is_used[:, rows[which]], axis=1)
        used = is_needed.nonzero()[0].tolist()
        return Processing(
            rows=None if len(which) == len(rows) else buffers.to_device(which),
            parts=tuple(
                (
                    self.processors[number],
                    {
                        name: buffers.to_device(values[rows[which]])
                        for name, values in self.host[number].items()
                    },
                )
                for number in used
            ),
        )
