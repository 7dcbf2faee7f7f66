"""The runner that launches every operation as it comes."""

from __future__ import annotations

from headstock.nn.eager_step import run_eager_step
from headstock.spi import Program, Runner, Sample, Step


class EagerRunner(Runner):
    """Runs the program operation by operation, for any batch on any device."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, step: Step) -> Sample:
        """What the step's scored tokens sample.   writes: the pools, the token table"""
        return run_eager_step(self.program, step)

    def close(self) -> None:
        """Drop the program, which holds the weights."""
        del self.program
