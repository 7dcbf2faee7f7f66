"""Model families that are each wrong in one way: Qwen3, and one thing changed."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from headstock.spi import KVGroup, ModelConfig
from headstock_qwen.families import QWEN3


def config_none(hf: Any) -> Any:
    QWEN3.config(sound(hf))


def config_type_error(hf: Any) -> ModelConfig:
    return QWEN3.config(sound(hf), dtype="float32")  # type: ignore[call-arg]


def config_missing(hf: Any) -> ModelConfig:
    return QWEN3.config({**sound(hf), "head_dim": hf["head_width"]})


def sound(hf: Any) -> dict[str, Any]:
    """The fields as the sound family knows them."""
    return {**hf, "architectures": ["Qwen3ForCausalLM"]}


def read(hf: Any) -> ModelConfig:
    return evolve(QWEN3.config(sound(hf)), architecture=hf["architectures"][0])


def two_groups(hf: Any) -> ModelConfig:
    config = read(hf)
    (group,) = config.kv_groups
    return evolve(config, kv_groups=(group, KVGroup(layers=(0,), layout=group.layout)))


def params_raise(config: ModelConfig) -> Any:
    return {f"layer {number}": None for number in range(config.num_layers)}  # type: ignore[attr-defined]


def forward_none(*arguments: Any) -> Any:
    QWEN3.forward(*arguments)


def forward_raises(params: Any, config: Any, batch: Any, attend: Any, ops: Any) -> Any:
    return params["model.embed_tokens"]


CONFIG_NONE = evolve(QWEN3, config=config_none)
CONFIG_TYPE_ERROR = evolve(QWEN3, config=config_type_error)
CONFIG_MISSING = evolve(QWEN3, config=config_missing)
TWO_GROUPS = evolve(QWEN3, config=two_groups)
PARAMS_RAISE = evolve(QWEN3, config=read, params=params_raise)
FORWARD_NONE = evolve(QWEN3, config=read, forward=forward_none)
FORWARD_RAISES = evolve(QWEN3, config=read, forward=forward_raises)
NO_MODEL = {"config": read}


def forward_short(*arguments: Any) -> Any:
    return QWEN3.forward(*arguments)[:-1]


def forward_wide(*arguments: Any) -> Any:
    return QWEN3.forward(*arguments).repeat(1, 2)


FORWARD_SHORT = evolve(QWEN3, config=read, forward=forward_short)
FORWARD_WIDE = evolve(QWEN3, config=read, forward=forward_wide)
