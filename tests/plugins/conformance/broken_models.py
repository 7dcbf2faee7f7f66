"""Model families that are wrong in one way each."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import Tensor

from headstock.spi import (
    Attend,
    Batch,
    ModelConfig,
    Ops,
    Params,
)
from headstock_olmo.families import OLMO2
from headstock_qwen.families import QWEN3

EPS_IGNORED = evolve(QWEN3, config=lambda hf: evolve(QWEN3.config(hf), norm_eps=1e-6))


ROPE_IGNORED = evolve(
    QWEN3,
    config=lambda hf: evolve(
        config := QWEN3.config(hf), ropes=(evolve(config.ropes[0], theta=10_000.0),)
    ),
)


EOS_DROPPED = evolve(QWEN3, config=lambda hf: evolve(QWEN3.config(hf), eos_ids=()))


SECOND_EOS_DROPPED = evolve(
    QWEN3, config=lambda hf: evolve(config := QWEN3.config(hf), eos_ids=config.eos_ids[:2])
)


POSITIONS_CUT = evolve(
    QWEN3,
    config=lambda hf: evolve(
        config := QWEN3.config(hf), max_position=min(config.max_position, 1000)
    ),
)


NORMS_WIDE = evolve(QWEN3, config=lambda hf: evolve(QWEN3.config(hf), wide_norms=True))


NORMS_NARROW = evolve(OLMO2, config=lambda hf: evolve(OLMO2.config(hf), wide_norms=False))


def forward_by_chunk(
    params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops
) -> Tensor:
    """Counts positions from the first token of a step."""
    counted = batch.positions - batch.starts[batch.token_rows]
    return QWEN3.forward(params, config, evolve(batch, positions=counted), attend, ops)


def forward_first_rows(
    params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops
) -> Tensor:
    """Computes the first 20 rows of a step."""
    hidden = QWEN3.forward(params, config, batch, attend, ops)
    return hidden * (batch.token_rows < 20)[:, None]


def config_of_mine(hf: Any) -> ModelConfig:
    """As Qwen3 has it, under another name."""
    return QWEN3.config({**hf, "architectures": ["Qwen3ForCausalLM"]})


MINE = evolve(QWEN3, config=config_of_mine)


CHUNKS_COUNTED = evolve(MINE, forward=forward_by_chunk)


ROWS_CUT = evolve(MINE, forward=forward_first_rows)


NO_END = evolve(MINE, config=lambda hf: evolve(config_of_mine(hf), eos_ids=()))


SHORT = evolve(
    MINE,
    config=lambda hf: evolve(
        config := config_of_mine(hf), max_position=min(config.max_position, 1000)
    ),
)
