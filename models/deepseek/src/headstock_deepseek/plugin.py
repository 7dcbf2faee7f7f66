"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def deepseek_v2() -> ModelSpec:
    """DeepSeek-V2, with latent attention and experts."""
    return _make_spec(
        "DeepseekV2ForCausalLM", "DEEPSEEK_V2", "DeepSeek-V2, with latent attention and experts"
    )


def deepseek_v3() -> ModelSpec:
    """DeepSeek-V3 and R1, with latent attention and experts chosen by a bias."""
    return _make_spec(
        "DeepseekV3ForCausalLM",
        "DEEPSEEK_V3",
        "DeepSeek-V3 and R1, with latent attention and experts chosen by a bias",
    )


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_deepseek.families:{model}",
    )
