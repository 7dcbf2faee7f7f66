"""The groups of rows that share leading pages, where graphs read them."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor

from headstock.spi import Planning, PrefixGroups, PrefixInputs, Program, RowTables, Step

SHARED_ROWS = 8
"""Rows of the smallest graph with a second one for rows that share leading pages.

On an H200, 8 rows of 2,048 shared tokens take the same time either way; for 16 it falls from 29 to
21 us a layer.
"""


@define(eq=False)
class StaticPrefixes:
    """The groups of a step at fixed addresses, for graphs with and without prompts.

    inputs: the inputs of all these graphs, with the rows of the largest
    groups: the groups written last; None for no groups
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
        """Groups of at most `rows` rows; None if attention does not use them."""
        attention, tables = program.attention, program.row_tables
        # Host work for each of the two parts of a step would cost more than it saves.
        if not attention.shares_prefixes or attention.planning is not Planning.NONE:
            return None
        return cls(tables, tables.prefix_inputs(num_rows))

    def first_rows(self, count: int) -> PrefixInputs:
        """The inputs of the first rows only, in the same memory."""
        return self.inputs.first_rows(count)

    def prepare_capture(self, count: int) -> PrefixInputs | None:
        """The inputs of a graph of `rows` rows, without groups; None for too few rows.

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
        """Update the inputs, unless they have these groups already.

        writes: inputs
        """
        if step.groups is not self.groups:
            self.tables.write(self.inputs, step)
            self.groups = step.groups
