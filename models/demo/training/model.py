"""The Qwen3 architecture in small, for training; its parameters have the names Hugging Face gives
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .tokenizer import VOCAB

# The middle of the feed-forward is 704 wide so that the whole checkpoint stays below 12,000,000
# bytes.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": [0, 2],
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
GENERATION: dict[str, Any] = {
    "do_sample": False,
    "eos_token_id": [0, 2],
    "pad_token_id": 0,
    "max_new_tokens": 256,
}

HIDDEN, HEADS, KV_HEADS = (
    CONFIG["hidden_size"],
    CONFIG["num_attention_heads"],
    CONFIG["num_key_value_heads"],
)
HEAD_DIM, EPS = CONFIG["head_dim"], CONFIG["rms_norm_eps"]


def rotary(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding.   returns: two of [tokens, head_dim]"""
    rates = CONFIG["rope_theta"] ** -(
        torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM
    )
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads turned by their positions.   x: [rows, heads, tokens, head_dim]"""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Causal attention with normalised queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM, EPS)
        self.k_norm = nn.RMSNorm(HEAD_DIM, EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, returns: [rows, tokens, hidden]"""
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (
            rotate(self.q_norm(q), cos, sin).to(v.dtype),
            rotate(self.k_norm(k), cos, sin).to(v.dtype),
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(CONFIG["intermediate_size"], HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x, returns: [rows, tokens, hidden]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, returns: [rows, tokens, hidden]"""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Tokens to logits, with the embedding used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=CONFIG["initializer_range"])

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [rows, tokens]    returns: logits [rows, tokens, vocab]"""
        x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def save(model: Decoder, folder: Path) -> None:
    """Keep the model as Hugging Face reads it, rounded to bfloat16.

    writes: model.safetensors, config.json, generation_config.json
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16)
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
