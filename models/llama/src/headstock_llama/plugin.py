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


def ministral3() -> ModelSpec:
    """Ministral 3, up to the length from which its queries are scaled."""
    return _make_spec("Ministral3ForCausalLM", "families:MINISTRAL3", "Ministral 3")


def mistral3() -> ModelSpec:
    """Mistral Small 3 and Devstral with images, for their text."""
    return _make_spec(
        "Mistral3ForConditionalGeneration",
        "vision:MISTRAL3",
        "Mistral Small 3 and Devstral beside images, their text alone",
    )


def llava() -> ModelSpec:
    """LLaVA over Llama or Mistral, and Pixtral, for their text."""
    return _make_spec(
        "LlavaForConditionalGeneration",
        "vision:LLAVA",
        "LLaVA 1.5 and Pixtral beside images, their text alone",
    )


def llava_next() -> ModelSpec:
    """LLaVA-NeXT over Llama or Mistral, for its text."""
    return _make_spec(
        "LlavaNextForConditionalGeneration",
        "vision:LLAVA_NEXT",
        "LLaVA 1.6 beside images, its text alone",
    )


def idefics3() -> ModelSpec:
    """Idefics3, for its text."""
    return _make_spec(
        "Idefics3ForConditionalGeneration",
        "vision:IDEFICS3",
        "Idefics3 and SmolVLM beside images, their text alone",
    )


def smolvlm() -> ModelSpec:
    """SmolVLM2, for its text."""
    return _make_spec(
        "SmolVLMForConditionalGeneration",
        "vision:SMOLVLM",
        "SmolVLM2 beside images, its text alone",
    )


def mixtral() -> ModelSpec:
    """Mixtral, mixture of experts."""
    return _make_spec("MixtralForCausalLM", "variants:MIXTRAL", "Mixtral, mixture of experts")


def granite() -> ModelSpec:
    """Granite, dense."""
    return _make_spec("GraniteForCausalLM", "variants:GRANITE", "Granite 3, dense")


def granite_moe() -> ModelSpec:
    """Granite, mixture of experts."""
    return _make_spec(
        "GraniteMoeForCausalLM", "variants:GRANITE_MOE", "Granite 3, mixture of experts"
    )


def granite_moe_shared() -> ModelSpec:
    """Granite, mixture of experts with a shared one."""
    return _make_spec(
        "GraniteMoeSharedForCausalLM",
        "variants:GRANITE_MOE_SHARED",
        "Granite, mixture of experts with a shared one",
    )


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
