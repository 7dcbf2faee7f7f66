"""The entry point that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def lfm2() -> ModelSpec:
    """LFM2, with short convolutions in most layers."""
    return ModelSpec(
        name="Lfm2ForCausalLM",
        spi=SpiRange(0, 3),
        summary="LFM2, with short convolutions in most layers",
        implementation="headstock_lfm2.families:LFM2",
    )
