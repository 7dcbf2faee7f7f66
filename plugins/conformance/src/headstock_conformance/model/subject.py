"""A family under test: its small checkpoints, and the model of one over pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun, describe_error
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Model, ModelSpec
from headstock.startup.model_loading import untie_embeddings
from headstock.weights import load_weights, read_config
from headstock_conformance.model.paged import Paged
from headstock_conformance.model.parity import write

LENGTH = 40
"""Tokens of the prompt: longer than the tested windows."""
TOLERANCE = 1e-4
"""Tolerance of a log-probability, in float32."""

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "num_experts": 6,
        "num_local_experts": 6,
        "moe_num_experts": 6,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_k": 2,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
)
"""Sizes by their names in config.json; a family gets those that its transformers class has."""

STATES: Mapping[str, str] = MappingProxyType(
    {"conv_L_cache": "conv", "linear_conv_kernel_dim": "linear_attention"}
)
"""What layers that keep a state are called, by a field of the classes that have some."""

SMALL_TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 16,
        "embed_dim": 16,
        "intermediate_size": 16,
        "out_hidden_size": SMALL["hidden_size"],
        "num_hidden_layers": 1,
        "depth": 1,
        "num_attention_heads": 2,
        "num_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "fullatt_block_indexes": [0],
        "deepstack_visual_indexes": [0],
    }
)
"""Sizes of a part for images; it gets those that its transformers class has."""


@frozen(kw_only=True)
class Subject:
    """A model family, and the fields of its transformers class with their defaults.

    fields: those of the decoder
    whole: those around it, in a model that takes more than text; None in one of text
    has_sections: whether sections of a head have positions of their own
    """

    spec: ModelSpec
    family: Model
    model_type: str
    fields: Mapping[str, Any]
    whole: Mapping[str, Any] | None = None
    has_sections: bool = False

    def make_config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of a small model, with those changes that its class has."""
        kind = {"model_type": self.model_type, "architectures": [self.spec.name]}
        decoder = self._make_decoder(changes)
        if self.whole is None:
            return {**kind, **decoder}
        values = {name: value for name, value in changes.items() if name in self.whole}
        text = {"model_type": self.fields["model_type"], **decoder}
        tower = self.whole["vision_config"]
        if tower is None:  # some classes make no tower by default
            return {**kind, **values, "text_config": text}
        small = {name: value for name, value in SMALL_TOWER.items() if name in tower}
        vision = {"model_type": tower["model_type"], **small}
        return {**kind, **values, "text_config": text, "vision_config": vision}

    def _make_decoder(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's fields of a small model."""
        small = {name: value for name, value in SMALL.items() if name in self.fields}
        if self.fields.get("layer_types", ()) is None:
            # Some classes have no default of their own.
            small["layer_types"] = ["full_attention"] * small["num_hidden_layers"]
        for name, kind in STATES.items():
            if name in self.fields:
                # Those of the class are of a larger model, or all of one kind.
                small["layer_types"] = [kind, "full_attention", kind]
        if "linear_conv_kernel_dim" in self.fields:
            # A norm of what memories give makes small numbers large, and the rounding of chunks.
            small["rms_norm_eps"] = 0.3
        if "kv_lora_rank" in self.fields:
            # one latent vector serves all heads
            small.pop("head_dim", None)
            small["num_key_value_heads"] = small["num_attention_heads"]
        values = {name: value for name, value in changes.items() if name in self.fields}
        if self.has_sections:
            # Those of the class do not fit the small heads.
            table = values.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
            dim = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
            if self.model_type.startswith("glm4v_moe"):
                dim //= 2  # its class turns half of each head
            values["rope_parameters"] = {**table, "mrope_section": [dim // 4, dim // 8, dim // 8]}
        return {**small, **values}


def make_checkpoint(subject: Subject, changes: Mapping[str, Any], directory: Path) -> None:
    """A small checkpoint.   raises: CannotRun when transformers cannot make one"""
    try:
        write(directory, subject.make_config(changes))
    except Exception as error:
        raise CannotRun(
            f"transformers {transformers.__version__} cannot make it: {describe_error(error)}"
        ) from error


def load(subject: Subject, directory: Path, page_size: int, length: int = LENGTH) -> Paged:
    """The model over pages for two sequences, in float32."""
    config = subject.family.config(read_config(directory))
    config = untie_embeddings(directory, subject.family, config)
    params = load_weights(
        directory,
        subject.family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=length,
    )
    return Paged.new(
        subject.family,
        config,
        params,
        TorchOps(),
        page_size=page_size,
        sequences=2,
        length=length,
    )


def compare(actual: Tensor, expected_scores: Tensor, text: str) -> None:
    """Raise AssertionError unless the log-probabilities are those of transformers."""
    assert actual.shape == expected_scores.shape, (
        f"scores: expected {tuple(expected_scores.shape)}, got {tuple(actual.shape)}"
    )
    off = (actual.log_softmax(-1) - expected_scores).abs().amax(-1)
    wrong = ~(off <= TOLERANCE)
    assert not bool(wrong.any()), (
        f"{text}log-probabilities are off by up to {float(off.max()):.2g} from those of "
        f"transformers, first at token {int(wrong.nonzero()[0])}"
    )
