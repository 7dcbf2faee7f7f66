"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def qwen2() -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return spec("Qwen2ForCausalLM", "QWEN2", "Qwen2 and Qwen2.5, dense")


def qwen2_moe() -> ModelSpec:
    """Qwen2, mixture of experts."""
    return spec("Qwen2MoeForCausalLM", "QWEN2_MOE", "Qwen1.5-MoE and Qwen2, mixture of experts")


def qwen3() -> ModelSpec:
    """Qwen3, dense."""
    return spec("Qwen3ForCausalLM", "QWEN3", "Qwen3, dense")


def qwen3_moe() -> ModelSpec:
    """Qwen3, mixture of experts."""
    return spec("Qwen3MoeForCausalLM", "QWEN3_MOE", "Qwen3, mixture of experts")


def spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_qwen.families:{model}",
    )
