"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def qwen2() -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return spec("Qwen2ForCausalLM", "families:QWEN2", "Qwen2 and Qwen2.5, dense")


def qwen2_moe() -> ModelSpec:
    """Qwen2, mixture of experts."""
    return spec(
        "Qwen2MoeForCausalLM", "families:QWEN2_MOE", "Qwen1.5-MoE and Qwen2, mixture of experts"
    )


def qwen3() -> ModelSpec:
    """Qwen3, dense."""
    return spec("Qwen3ForCausalLM", "families:QWEN3", "Qwen3, dense")


def qwen3_moe() -> ModelSpec:
    """Qwen3, mixture of experts."""
    return spec("Qwen3MoeForCausalLM", "families:QWEN3_MOE", "Qwen3, mixture of experts")


def qwen2_vl() -> ModelSpec:
    """Qwen2-VL, for its text."""
    return spec(
        "Qwen2VLForConditionalGeneration",
        "vision:QWEN2_VL",
        "Qwen2-VL beside images, its text alone",
    )


def qwen2_5_vl() -> ModelSpec:
    """Qwen2.5-VL, for its text."""
    return spec(
        "Qwen2_5_VLForConditionalGeneration",
        "vision:QWEN2_5_VL",
        "Qwen2.5-VL beside images, its text alone",
    )


def qwen3_vl() -> ModelSpec:
    """Qwen3-VL, for its text."""
    return spec(
        "Qwen3VLForConditionalGeneration",
        "vision:QWEN3_VL",
        "Qwen3-VL beside images, its text alone",
    )


def qwen3_vl_moe() -> ModelSpec:
    """Qwen3-VL with experts, for its text."""
    return spec(
        "Qwen3VLMoeForConditionalGeneration",
        "vision:QWEN3_VL_MOE",
        "Qwen3-VL with experts, beside images, its text alone",
    )


def qwen3_next() -> ModelSpec:
    """Qwen3-Next, mixture of experts."""
    return spec("Qwen3NextForCausalLM", "hybrid:QWEN3_NEXT", "Qwen3-Next and Qwen3-Coder-Next")


def qwen3_5() -> ModelSpec:
    """Qwen3.5, dense, the text alone."""
    return spec("Qwen3_5ForCausalLM", "hybrid:QWEN3_5", "Qwen3.5, dense")


def qwen3_5_moe() -> ModelSpec:
    """Qwen3.5, mixture of experts, the text alone."""
    return spec("Qwen3_5MoeForCausalLM", "hybrid:QWEN3_5_MOE", "Qwen3.5, mixture of experts")


def qwen3_5_beside_images() -> ModelSpec:
    """Qwen3.5, for its text."""
    return spec(
        "Qwen3_5ForConditionalGeneration",
        "hybrid:QWEN3_5_BESIDE_IMAGES",
        "Qwen3.5 beside images, its text alone",
    )


def qwen3_5_moe_beside_images() -> ModelSpec:
    """Qwen3.5 with experts, for its text."""
    return spec(
        "Qwen3_5MoeForConditionalGeneration",
        "hybrid:QWEN3_5_MOE_BESIDE_IMAGES",
        "Qwen3.5 with experts, beside images, its text alone",
    )


def llava_onevision() -> ModelSpec:
    """LLaVA-OneVision over Qwen2, for its text."""
    return spec(
        "LlavaOnevisionForConditionalGeneration",
        "vision:LLAVA_ONEVISION",
        "LLaVA-OneVision beside images, its text alone",
    )


def internvl() -> ModelSpec:
    """InternVL over Qwen2 or Qwen3, for its text."""
    return spec(
        "InternVLForConditionalGeneration",
        "vision:INTERNVL",
        "InternVL 2.5, 3 and 3.5 beside images, their text alone",
    )


def spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_qwen.{model}",
    )
