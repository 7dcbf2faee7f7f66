"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def olmo2() -> ModelSpec:
    """OLMo-2, with norms after each part."""
    return _make_spec("Olmo2ForCausalLM", "OLMO2", "OLMo-2, with norms after each part")


def olmo3() -> ModelSpec:
    """OLMo-3, with windows in most layers."""
    return _make_spec("Olmo3ForCausalLM", "OLMO3", "OLMo-3, with windows in most layers")


def exaone4() -> ModelSpec:
    """EXAONE-4, with norms after each part."""
    return _make_spec("Exaone4ForCausalLM", "EXAONE4", "EXAONE-4, with norms after each part")


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_olmo.families:{model}",
    )
