"""The entry point that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def transformers() -> ModelSpec:
    """Any causal decoder that transformers computes through its attention interface."""
    return ModelSpec(
        name="transformers",
        spi=SpiRange(0, 3),
        summary="decoders that transformers computes, where no family serves the architecture",
        implementation="headstock_transformers.family:make_family",
        options="headstock_transformers.options:TransformersOptions",
    )
