"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def gemma2() -> ModelSpec:
    """Gemma-2, with bounded scores and windows in every second layer."""
    return _make_spec(
        "Gemma2ForCausalLM",
        "GEMMA2",
        "Gemma-2, with bounded scores and windows in every second layer",
    )


def gemma3() -> ModelSpec:
    """Gemma-3 text models, with windows in most layers."""
    return _make_spec(
        "Gemma3ForCausalLM", "GEMMA3", "Gemma-3 text models, with windows in most layers"
    )


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_gemma.families:{model}",
    )
