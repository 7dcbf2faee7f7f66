"""The entry points that headstock's registry reads; imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def llama() -> ModelSpec:
    """Llama 2, 3 and models of their shape."""
    return _make_spec("LlamaForCausalLM", "families:LLAMA", "Llama 2, 3 and models of their shape")


def mistral() -> ModelSpec:
    """Mistral 7B and models of its shape."""
    return _make_spec(
        "MistralForCausalLM",
        "families:MISTRAL",
        "Mistral 7B and models of its shape, with sliding windows",
    )


def ministral() -> ModelSpec:
    """Ministral, and Mistral with windows by layer as re-saved by transformers 5."""
    return _make_spec(
        "MinistralForCausalLM",
        "families:MINISTRAL",
        "Ministral 8B and models of its shape, with sliding windows in some layers",
    )


def mixtral() -> ModelSpec:
    """Mixtral, mixture of experts."""
    return _make_spec("MixtralForCausalLM", "variants:MIXTRAL", "Mixtral, mixture of experts")


def granite() -> ModelSpec:
    """Granite, dense."""
    return _make_spec("GraniteForCausalLM", "variants:GRANITE", "Granite 3, dense")


def smollm3() -> ModelSpec:
    """SmolLM3."""
    return _make_spec("SmolLM3ForCausalLM", "variants:SMOLLM3", "SmolLM3, some layers without rope")


def seed_oss() -> ModelSpec:
    """Seed-OSS."""
    return _make_spec("SeedOssForCausalLM", "variants:SEED_OSS", "Seed-OSS")


def ernie() -> ModelSpec:
    """Ernie-4.5, dense."""
    return _make_spec("Ernie4_5ForCausalLM", "variants:ERNIE", "Ernie-4.5, dense")


def ernie_moe() -> ModelSpec:
    """Ernie-4.5, mixture of experts."""
    return _make_spec(
        "Ernie4_5_MoeForCausalLM", "variants:ERNIE_MOE", "Ernie-4.5, mixture of experts"
    )


def _make_spec(architecture: str, model: str, summary: str) -> ModelSpec:
    """The specification of one family."""
    return ModelSpec(
        name=architecture,
        spi=SpiRange(0, 3),
        summary=summary,
        implementation=f"headstock_llama.{model}",
    )
