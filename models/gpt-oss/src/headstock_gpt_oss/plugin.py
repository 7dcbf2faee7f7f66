"""The entry point that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def gpt_oss() -> ModelSpec:
    """GPT-OSS, with attention sinks and experts in every layer."""
    return ModelSpec(
        name="GptOssForCausalLM",
        spi=SpiRange(0, 3),
        summary="GPT-OSS, with attention sinks and experts in every layer",
        implementation="headstock_gpt_oss.families:GPT_OSS",
    )
