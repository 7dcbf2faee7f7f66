"""The entry point of `top-n-sigma`."""

from __future__ import annotations

from headstock.spi import LogitsSpec, SpiRange


def spec() -> LogitsSpec:
    """The spec of `top-n-sigma`."""
    return LogitsSpec(
        name="top-n-sigma",
        spi=SpiRange(0, 3),
        summary="samples from the scores within some standard deviations of the best one",
        implementation="headstock_top_n_sigma.processor:TopNSigma",
        request_args="headstock_top_n_sigma.args:TopNSigmaArgs",
    )
