"""The groups of rows that share leading pages, where graphs read them."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor

from headstock.spi import Planning, PrefixGroups, PrefixInputs, Program, RowTables, Step

SHARED_ROWS = 8
"""Rows of the smallest graph that has another one beside it for rows that share leading pages.

On an H200 8 rows of 2,048 shared tokens take the same either way, 16 take 21 us a layer for 29.
"""


@define(eq=False)
class StaticPrefixes:
    """The groups of a step at addresses that stay, for graphs with and without prompts.

    inputs: what all these graphs read, of as many rows as the largest has
    groups: those that were written last; None for no groups
    blank: the bytes of inputs without groups
    """

    tables: RowTables
    inputs: PrefixInputs
    groups: PrefixGroups | None = None
    blank: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Keep the bytes of inputs without groups, as core allocated them."""
        self.blank = self.inputs.memory.clone()

    @classmethod
    def new(cls, program: Program, num_rows: int) -> StaticPrefixes | None:
        """Groups of at most so many rows; None where attention makes no use of them."""
        attention, tables = program.attention, program.row_tables
        # Host work for each of the two parts of a step would cost more than it spares.
        if not attention.shares_prefixes or attention.planning is not Planning.NONE:
            return None
        return cls(tables, tables.prefix_inputs(num_rows))

    def first_rows(self, count: int) -> PrefixInputs:
        """The inputs of the first rows alone, over the same memory."""
        return self.inputs.first_rows(count)

    def prepare_capture(self, count: int) -> PrefixInputs | None:
        """The inputs of a graph of so many rows, without groups; None for too few rows.

        Work runs once before its capture, for rows of padding, which share nothing. A step between
        two captures may have left its groups here.

        writes: inputs
        """
        if count < SHARED_ROWS:
            return None
        self.inputs.memory.copy_(self.blank)
        self.groups = None
        return self.first_rows(count)

    def write(self, step: Step) -> None:
        """Bring the inputs up to date; nothing is done for the groups that they have.

        writes: inputs
        """
        if step.groups is not self.groups:
            self.tables.write(self.inputs, step)
            self.groups = step.groups
