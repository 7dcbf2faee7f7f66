"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def deepseek_v2() -> ModelSpec:
    """DeepSeek-V2, with latent attention and experts."""
    return _make_spec(
        "DeepseekV2ForCausalLM",
        "families:DEEPSEEK_V2",
        "DeepSeek-V2, with latent attention and experts",
    )


def deepseek_v3() -> ModelSpec:
    """DeepSeek-V3 and R1, with latent attention and experts chosen by a bias."""
    return _make_spec(
        "DeepseekV3ForCausalLM",
        "families:DEEPSEEK_V3",
        "DeepSeek-V3 and R1, with latent attention and experts chosen by a bias",
    )


def glm4_moe() -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7, mixture of experts."""
    return _make_spec(
        "Glm4MoeForCausalLM", "biased:GLM4_MOE", "GLM-4.5, 4.6 and 4.7, mixture of experts"
    )


def glm4v_moe() -> ModelSpec:
    """GLM-4.5V and 4.6V, for their text."""
    return _make_spec(
        "Glm4vMoeForConditionalGeneration",
        "biased:GLM4V_MOE",
        "GLM-4.5V and 4.6V beside images, their text alone",
    )


def glm4_moe_lite() -> ModelSpec:
    """GLM-4.7-Flash, with latent attention and experts."""
    return _make_spec(
        "Glm4MoeLiteForCausalLM",
        "families:GLM4_MOE_LITE",
        "GLM-4.7-Flash, with latent attention and experts",
    )


def hy_v3() -> ModelSpec:
    """Hy3, mixture of experts."""
    return _make_spec("HYV3ForCausalLM", "biased:HY_V3", "Hy3, mixture of experts")


def minimax_m2() -> ModelSpec:
    """MiniMax-M2, mixture of experts."""
    return _make_spec("MiniMaxM2ForCausalLM", "biased:MINIMAX_M2", "MiniMax-M2, mixture of experts")


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_deepseek.{model}",
    )
