"""headstock: an LLM inference engine whose parts are plugins.

Names are imported when they are first used, so that `import headstock` alone imports no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.config import EngineArgs, EngineConfig
    from headstock.errors import (
        AmbiguousPlugin,
        CannotRun,
        CapacityError,
        EngineDied,
        HeadstockError,
        ModelError,
        NotSupported,
        PluginBroken,
        RequestError,
        SpiMismatch,
        UnknownPlugin,
        UsageError,
    )
    from headstock.llm import LLM
    from headstock.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ToolCall,
    )
    from headstock.sampling_params import SamplingParams
    from headstock.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AmbiguousPlugin",
    "CannotRun",
    "CapacityError",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDied",
    "HeadstockError",
    "Logprob",
    "ModelError",
    "NotSupported",
    "PluginBroken",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpiMismatch",
    "StructuredOutputsParams",
    "ToolCall",
    "UnknownPlugin",
    "UsageError",
    "__version__",
]

HOMES = {
    "LLM": "headstock.llm",
    **dict.fromkeys(("EngineArgs", "EngineConfig"), "headstock.config"),
    "SamplingParams": "headstock.sampling_params",
    "StructuredOutputsParams": "headstock.structured_outputs",
    **dict.fromkeys(
        (
            "CompletionOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "Logprob",
            "RequestMetrics",
            "RequestOutput",
            "ToolCall",
        ),
        "headstock.outputs",
    ),
}
"""Where public names live; the rest are errors."""

FOREIGN = {
    **dict.fromkeys(
        ("AsyncLLM", "AsyncLLMEngine"),
        "LLM.astream(prompt, params) gives pieces of an answer, LLM.generate_async whole ones",
    ),
    "AsyncEngineArgs": "EngineArgs has the same flags, and LLM takes their values",
    "Engine": "SGLang's Engine(model_path=NAME) is LLM(NAME) here, with SamplingParams",
    "FlexibleArgumentParser": "EngineArgs.add_cli_args takes an argparse.ArgumentParser",
    "LLMEngine": "LLM runs its steps itself; LLM.stream(prompt, params) gives pieces of an answer",
    "LoRARequest": "LoRA adapters are not supported; merge one into its model",
    "PoolingParams": "LLM.embed(texts) returns a vector for each text",
    "RequestOutputKind": "LLM.generate gives whole answers, LLM.stream and LLM.astream pieces",
    "Runtime": "LLM(NAME) is an engine in this process, 'headstock serve NAME' one behind HTTP",
}
"""Names of vLLM and SGLang that are not here -> what to do in their place."""


def __getattr__(name: str) -> object:
    """The public name, from the module where it lives."""
    if name in FOREIGN:
        # Not an AttributeError, of which `from headstock import` would make its own text.
        raise ImportError(f"headstock has no {name}; {FOREIGN[name]}", name=name)
    if name not in __all__:
        raise AttributeError(f"module 'headstock' has no attribute {name!r}")
    if name == "LLM":  # it imports torch
        import_module("headstock.distributions").shield_torch(os.environ)
    return getattr(import_module(HOMES.get(name, "headstock.errors")), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
