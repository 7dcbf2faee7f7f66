"""The longest sequence: what the configuration asks for, and what the model allows."""

from __future__ import annotations

from typing import Any

import pytest

from headstock.config import EngineConfig
from headstock.errors import UsageError
from headstock.spi import ModelConfig
from headstock.startup.model_loading import resolve_max_seq_len
from headstock_llama.families import LLAMA

REASON = "as rope_type 'dynamic' turns every token anew beyond it"


def read(**changes: Any) -> ModelConfig:
    """A small Llama of 64 positions."""
    return LLAMA.config(
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            **changes,
        }
    )


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_dynamic_rope_is_served_up_to_the_models_positions_and_not_beyond(key: str) -> None:
    model = read(rope_scaling={key: "dynamic", "factor": 4.0})

    assert resolve_max_seq_len(EngineConfig(model="m"), model, []) == 64
    assert resolve_max_seq_len(EngineConfig(model="m", max_seq_len=64), model, []) == 64
    with pytest.raises(UsageError, match=f"own limit is 64 tokens, {REASON}; lower it"):
        resolve_max_seq_len(EngineConfig(model="m", max_seq_len=65), model, [])
    notes: list[str] = []
    config = EngineConfig(model="m", max_seq_len=65, max_seq_len_or_less=True)
    assert resolve_max_seq_len(config, model, notes) == 64
    assert notes == ["max_seq_len (--max-seq-len) 65 is cut to 64, the model's own limit"]


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}])
def test_other_ropes_have_a_limit_without_that_reason(scaling: Any) -> None:
    with pytest.raises(UsageError) as error:
        resolve_max_seq_len(EngineConfig(model="m", max_seq_len=65), read(rope_scaling=scaling), [])
    assert REASON not in str(error.value)


@pytest.mark.parametrize("kind", ["mrope", "ntk", "su", "proportional", "Dynamic", "longrope"])
def test_other_types_of_scaling_are_refused_by_name(kind: str) -> None:
    with pytest.raises(
        ValueError, match=f"rope_type: expected one of default, dynamic.* got '{kind}'"
    ):
        read(rope_scaling={"rope_type": kind, "factor": 4.0})
