"""The runner that launches every operation as it comes."""

from __future__ import annotations

from collections.abc import Callable

from headstock.spi import Attend, Batch, Program, Runner, Sample


class EagerRunner(Runner):
    """Runs the program operation by operation, for any batch on any device."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.   writes: batch.pools"""
        program = self.program
        hidden = program.model.forward(program.params, program.config, batch, attend, program.ops)
        if batch.logit_indices is not None:
            hidden = hidden[batch.logit_indices]
        return program.ops.lm_head_sample(program.params, program.config, hidden, batch.sampling)

    def capture(self, report: Callable[[str], None]) -> int:
        """Nothing is recorded."""
        return 0

    def close(self) -> None:
        """Nothing is held."""
