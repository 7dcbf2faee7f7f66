"""The entry point that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def phi3() -> ModelSpec:
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""
    return _make_spec("Phi3ForCausalLM", "PHI3", "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini")


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_phi.families:{model}",
    )
