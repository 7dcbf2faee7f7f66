"""Log-probabilities of a model directory, from transformers' AutoModelForCausalLM and from
headstock's decoder.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headstock.ops.torch_ops import TorchOps
from headstock.startup.model_loading import read_model, untie_embeddings
from headstock.weights import load_weights
from headstock_conformance.model.paged import Paged

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""`model_type`, the key in transformers -> the architecture, the key in headstock."""

SHAPE: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
"""A small model of any family; fields of experts only for families with experts."""

EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def shape(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model of that family, with changes."""
    names = [name for name in SHAPE if model_type == "qwen3_moe" or name not in EXPERTS]
    small = {name: SHAPE[name] for name in names}
    return {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        **small,
        **changes,
    }


def write(directory: Path, hf: Mapping[str, Any], seed: int = 0) -> None:
    """A checkpoint of `hf` in `directory`, config.json as given; weights, norms and biases all
    random.

    raises: any exception of transformers when it cannot make the model
    """
    path = directory / "config.json"
    path.write_text(json.dumps(hf))
    torch.manual_seed(seed)
    with silence_transformers():
        config: Any = AutoConfig.from_pretrained(directory)
        kind = _find_class(directory)
        make = kind.from_config if kind is AutoModelForCausalLM else kind
        model = make(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("norm", "scale")) or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "scalar")) and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.2)
    with silence_transformers():
        model.save_pretrained(directory)
    path.write_text(json.dumps(hf))


def _find_class(directory: Path) -> Any:
    """What makes transformers' model of config.json: that of text, or of more than text."""
    name: str = json.loads((directory / "config.json").read_text())["architectures"][0]
    is_text = not name.endswith("ForConditionalGeneration")
    return AutoModelForCausalLM if is_text else getattr(transformers, name)


def add_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add `tensors` to the checkpoint, or replace those of the same name."""
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def expected(directory: Path, prompt: Sequence[int]) -> Tensor:
    """The prompt's scores by transformers.   returns: [tokens, vocab] log-probabilities"""
    with silence_transformers(), torch.inference_mode():
        model = _find_class(directory).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        logits: Tensor = model.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def computed(directory: Path, prompt: Sequence[int], chunk: int | None = None) -> Tensor:
    """The prompt's scores by headstock, `chunk` tokens per step.

    returns: [tokens, vocab] log-probabilities
    """
    family, config = read_model(directory)
    config = untie_embeddings(directory, family, config)
    specs, length = family.params(config), len(prompt)
    assert length <= config.max_position
    params = load_weights(
        directory,
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=length,
    )
    paged = Paged.new(family, config, params, TorchOps(), page_size=16, sequences=1, length=length)
    size = chunk or length
    steps = [paged.step({0: prompt[start : start + size]}) for start in range(0, length, size)]
    return torch.cat(steps).log_softmax(-1)


def round_norms(directory: Path) -> bool | None:
    """Whether the last norm of transformers' model multiplies before it rounds to bfloat16.

    returns: None if neither gives the same bits
    """
    with silence_transformers(), torch.inference_mode():
        model = _find_class(directory).from_pretrained(directory, dtype=torch.bfloat16).eval()
        decoder = getattr(model.base_model, "language_model", model.base_model)
        norms = [part for name, part in decoder.named_children() if "norm" in name]
        if not norms or getattr(norms[-1], "weight", None) is None:
            return None
        norm = norms[-1]
        weight = norm.weight
        weight.copy_(torch.linspace(0.3, 7, len(weight)))
        eps = next((getattr(norm, each) for each in _EPS_NAMES if hasattr(norm, each)), 1e-6)
        x = torch.randn(9, len(weight), generator=torch.Generator().manual_seed(2)).bfloat16()
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        out: Tensor = norm(x)
        after = wide.bfloat16() * weight
        before = [(wide * (weight.float() + offset)).bfloat16() for offset in (0, 1)]
    if torch.equal(out, after):
        return False
    return True if any(torch.equal(out, each) for each in before) else None


_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def tokens(count: int, seed: int = 1) -> list[int]:
    """A prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=generator).tolist()


def assert_parity(directory: Path, prompt: Sequence[int]) -> None:
    """The log-probabilities of both are equal within 1e-4."""
    torch.testing.assert_close(
        computed(directory, prompt), expected(directory, prompt), atol=1e-4, rtol=0
    )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' warnings about deliberately odd configurations, and its progress
    bars."""
    level = transformers.logging.get_verbosity()
    bars: Any = transformers.logging  # has no types
    has_bars = bars.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if has_bars:
            bars.enable_progress_bar()
