"""The runner that launches every operation as it comes."""

from __future__ import annotations

from headstock.nn.eager_step import run_eager_step
from headstock.spi import Attend, Batch, Program, Runner, Sample


class EagerRunner(Runner):
    """Runs the program operation by operation, for any batch on any device."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, batch: Batch, attend: Attend) -> Sample:
        """Run the batch, and return what its logit positions sample.   writes: batch.pools"""
        return run_eager_step(self.program, batch, attend)

    def close(self) -> None:
        """Drop the program, which holds the weights."""
        del self.program
