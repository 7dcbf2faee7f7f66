"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def lfm2() -> ModelSpec:
    """LFM2, with short convolutions in most layers."""
    return _make_spec("Lfm2ForCausalLM", "LFM2", "LFM2, with short convolutions in most layers")


def lfm2_moe() -> ModelSpec:
    """LFM2, mixture of experts."""
    return _make_spec(
        "Lfm2MoeForCausalLM", "LFM2_MOE", "LFM2, mixture of experts, with short convolutions"
    )


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_lfm2.families:{model}",
    )
