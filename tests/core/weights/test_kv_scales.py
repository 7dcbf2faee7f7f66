"""Scales of 8-bit keys and values: read under every name, refused by name where they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from engine_parity import generate
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstock.config import EngineConfig
from headstock.errors import CannotRun, ModelError
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ModelConfig
from headstock.startup.model_loading import read_model
from headstock.startup.weight_notes import scale_kv
from headstock.weights import read_kv_scales
from headstock_conformance.model import parity
from headstock_conformance.ops.cases import batch_of
from headstock_conformance.ops.models import draw_weights, make_latent_config

KV_FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False},
}
"""What compressed-tensors says of a checkpoint of which keys and values alone are quantized."""
ATTENTION = "model.layers.1.self_attn"
PAIR = {f"{ATTENTION}.k_scale": torch.tensor(0.5), f"{ATTENTION}.v_scale": torch.tensor([2.0])}


def find_scales(
    directory: Path, kv_dtype: str = "float8_e4m3fn"
) -> tuple[list[tuple[float, float]], str]:
    """The scales of each layer, and what is said of them."""
    family, model = read_model(directory)
    scaled, note = scale_kv(EngineConfig(), directory, family, model, kv_dtype)
    return [(layer.k_scale, layer.v_scale) for layer in scaled.layers], note


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_cache.scale", "v_cache.scale"),
        ("kv_scale", "kv_scale"),
    ],
)
def test_scales_are_found_under_every_name(
    keys: str, values: str, write: Any, tensors: dict[str, Tensor]
) -> None:
    scales = {f"{ATTENTION}.{values}": torch.tensor([0.25], dtype=torch.bfloat16)}
    scales |= {f"{ATTENTION}.{keys}": torch.tensor(0.5)}
    directory = write(tensors | scales, quantization_config=KV_FP8)
    v_scale = 0.5 if keys == values else 0.25

    found, note = find_scales(directory)

    assert found == [(1.0, 1.0), (0.5, v_scale)]
    assert note == "keys and values of 1 layer have scales of the checkpoint"


def test_a_pool_of_16_bits_leaves_them_unread_and_says_so(
    write: Any, tensors: dict[str, Tensor]
) -> None:
    directory = write(tensors | PAIR, quantization_config=KV_FP8)

    assert find_scales(directory, "bfloat16") == (
        [(1.0, 1.0)] * 2,
        "scales of keys and values are not read, as the KV pool is bfloat16: 2 tensors",
    )


def only(name: str, value: Any, **others: Any) -> dict[str, Tensor]:
    """The two scales, one of them with another value."""
    return PAIR | {f"{ATTENTION}.{name}": torch.as_tensor(value)}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (only("k_scale", 0.0), "k_scale in .*: expected a finite number above 0, got 0"),
        (only("v_scale", -1.0), "v_scale in .*: expected a finite number above 0, got -1"),
        (only("k_scale", math.nan), "k_scale in .*: expected a finite number above 0, got nan"),
        (only("v_scale", math.inf), "v_scale in .*: expected a finite number above 0, got inf"),
        (only("k_scale", [1.0, 2.0]), r"k_scale in .*: expected one number .* got shape \[2\]"),
        (only("k_scale", 3), r"k_scale in .*: expected one number .* got shape \[\] of I64"),
        (
            dict([next(iter(PAIR.items()))]),
            "k_scale in .* scales keys, and the values of its layer have no scale",
        ),
        (
            dict([list(PAIR.items())[1]]),
            "v_scale in .* scales values, and the keys of its layer have no scale",
        ),
        (
            only("attn.k_scale", 1.0),
            r"self_attn\.attn\.k_scale and .*self_attn\.k_scale in .* scale the same numbers",
        ),
        (only("kv_scale", 1.0), r"k_scale and .*self_attn\.kv_scale in .* scale the same numbers"),
        (
            PAIR | {"model.layers.7.self_attn.k_scale": torch.tensor(1.0)},
            r"layers\.7\.self_attn\.k_scale in .* scales keys or values of no layer of the model",
        ),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(
    scales: Mapping[str, Tensor], message: str, write: Any, tensors: dict[str, Tensor]
) -> None:
    directory = write(tensors | scales, quantization_config=KV_FP8)

    with pytest.raises(ModelError, match=f"{message}.*; set kv_dtype") as error:
        find_scales(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "kv_cache_scheme.type 'int'"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits 4"),
        ({"kv_cache_scheme": {"strategy": "channel"}}, "kv_cache_scheme.strategy 'channel'"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo 'NVFP4'",
        ),
    ],
)
def test_scales_of_other_numbers_than_fp8_are_refused(
    said: dict[str, Any], name: str, write: Any, tensors: dict[str, Tensor]
) -> None:
    directory = write(tensors | PAIR, quantization_config=KV_FP8 | said)

    with pytest.raises(CannotRun, match=f"{name}.*; set kv_dtype"):
        find_scales(directory)
    assert find_scales(directory, "float16")[0] == [(1.0, 1.0)] * 2


K_SCALE, V_SCALE = 4096.0, 1024.0


@pytest.fixture(scope="module")
def scaled_and_divided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with scales, of keys and values far beyond FP8, and one whose maps are divided
    by them instead: powers of two, so that every product has the same bits.
    """
    scaled, divided = (tmp_path_factory.mktemp(name) for name in ("scaled", "divided"))
    hf = parity.shape("llama")
    parity.write(divided, hf)
    tensors = load_file(divided / "model.safetensors")
    gains = {"q_proj": 1 / K_SCALE, "k_proj": K_SCALE, "v_proj": V_SCALE, "o_proj": 1 / V_SCALE}
    for name in list(tensors):
        tensors[name] = tensors[name] * next((g for p, g in gains.items() if p in name), 1.0)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(K_SCALE)
        tensors[f"{attention}.v_proj.v_scale"] = torch.tensor(V_SCALE)
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    (scaled / "config.json").write_text(json.dumps(hf | {"quantization_config": KV_FP8}))
    return scaled, divided


def list_answers(directory: Path, **settings: Any) -> list[Any]:
    """The tokens and log-probabilities of all prompts."""
    # One after another: which prompts share a step depends on when they arrive, and sums of other
    # steps round otherwise.
    outputs, _ = generate(directory, max_running_requests=1, **settings)
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.feature("P7")
@pytest.mark.parametrize(
    "settings",
    [
        {"debug_attention": True, "debug_ops": True, "max_batch_tokens": 16},
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                {"ops": "torch", "paged_attn": "off", "page_size": "auto", "debug_canary": False},
                {"tp": 2, "ops": "torch"},
            )
        ),
    ],
    ids=lambda settings: ",".join(settings),
)
def test_stored_scales_give_the_answers_of_maps_divided_by_them(
    settings: dict[str, Any], scaled_and_divided: tuple[Path, Path]
) -> None:
    scaled, divided = scaled_and_divided
    narrow = list_answers(divided, kv_dtype="fp8_e4m3", **settings)

    assert list_answers(scaled, kv_dtype="fp8_e4m3", **settings) == narrow
    assert list_answers(scaled, **settings) == list_answers(divided, **settings) != narrow


def test_latent_vectors_have_one_scale(write: Any, tensors: dict[str, Tensor]) -> None:
    directory = write(tensors | PAIR, quantization_config=KV_FP8)
    family, model = read_model(directory)
    latent: Any = object()
    layers = tuple(evolve(layer, latent=latent) for layer in model.layers)

    with pytest.raises(ModelError, match=r"k_scale .* is 0\.5 and .*v_scale is 2, but keys"):
        read_kv_scales(directory, family.params(model), evolve(model, layers=layers))


def test_latent_vectors_are_divided_by_their_scale_before_they_are_stored() -> None:
    config = make_latent_config()
    layers = tuple(evolve(layer, k_scale=4.0, v_scale=4.0) for layer in config.layers)
    weights = draw_weights(config, torch.float32, "cpu")

    def store(model: ModelConfig) -> Tensor:
        """The first layer's vectors of a step of 7 tokens."""
        ops = TorchOps()
        params = weights.prepare(ops)
        ops.bind(params, model)
        batch = batch_of(model, 7, torch.float32, "cpu")
        ops.qkv_rope_store(ops.embed(batch), model.layers[0], batch)
        return batch.pools[0]

    stored = store(config)
    assert stored.any()
    assert torch.equal(store(evolve(config, layers=layers)), stored / 4)
