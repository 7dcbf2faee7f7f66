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


def gemma3_text() -> ModelSpec:
    """Gemma-3 models that take images, for their text."""
    return _make_spec(
        "Gemma3ForConditionalGeneration", "GEMMA3_TEXT", "Gemma-3 beside images, its text alone"
    )


def gemma4() -> ModelSpec:
    """Gemma-4 text models, with heads by kind of layer."""
    return _make_spec(
        "Gemma4ForCausalLM",
        "GEMMA4",
        "Gemma-4 text models, with wide heads in some layers",
        "gemma4",
    )


def gemma4_beside_images() -> ModelSpec:
    """Gemma-4 models that take images and sound, for their text."""
    return _make_spec(
        "Gemma4ForConditionalGeneration",
        "GEMMA4_BESIDE_IMAGES",
        "Gemma-4 beside images and sound, its text alone",
        "gemma4",
    )


def gemma4_unified() -> ModelSpec:
    """The text models of Gemma-4 without towers."""
    return _make_spec(
        "Gemma4UnifiedForCausalLM",
        "GEMMA4_UNIFIED",
        "Gemma-4 (12B) text models, with wide heads in some layers",
        "gemma4",
    )


def gemma4_unified_beside_images() -> ModelSpec:
    """Gemma-4 models without towers that take images and sound, for their text."""
    return _make_spec(
        "Gemma4UnifiedForConditionalGeneration",
        "GEMMA4_UNIFIED_BESIDE_IMAGES",
        "Gemma-4 (12B) beside images and sound, its text alone",
        "gemma4",
    )


def _make_spec(architecture: str, model: str, summary: str, module: str = "families") -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_gemma.{module}:{model}",
    )
