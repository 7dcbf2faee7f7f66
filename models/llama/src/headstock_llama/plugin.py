"""What headstock's registry reads; importing it imports neither torch nor a model."""

from __future__ import annotations

from headstock.spi import ModelSpec, SpiRange


def llama() -> ModelSpec:
    """Llama 2, 3 and models of their shape."""
    return ModelSpec(
        name="LlamaForCausalLM",
        spi=SpiRange(0, 2),
        summary="Llama 2, 3 and models of their shape",
        implementation="headstock_llama.families:LLAMA",
    )


def mistral() -> ModelSpec:
    """Mistral 7B and models of its shape."""
    return ModelSpec(
        name="MistralForCausalLM",
        spi=SpiRange(0, 2),
        summary="Mistral 7B and models of its shape, with sliding windows",
        implementation="headstock_llama.families:MISTRAL",
    )


def ministral() -> ModelSpec:
    """Ministral, and Mistral with windows by layer as transformers 5 saves it again."""
    return ModelSpec(
        name="MinistralForCausalLM",
        spi=SpiRange(0, 2),
        summary="Ministral 8B and models of its shape, with sliding windows in some layers",
        implementation="headstock_llama.families:MINISTRAL",
    )
