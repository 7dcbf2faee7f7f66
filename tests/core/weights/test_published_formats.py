"""Quantized checkpoints as people publish them stand for the numbers that their formats say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import NEW, Case, log_probabilities
from load_rank import WHOLE, load_rank
from often import often
from quantized_checkpoints import SCHEMES, pack_words, write_quantized
from safetensors.torch import load_file, save_file
from wrappers import CASES as WRAPPED

from headstock.errors import ModelError
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ParamSpec, Role, Shard, Weight, WeightFormat
from headstock.startup.model_loading import read_model
from headstock.weights import dequantize_
from headstock_conformance.model.parity import computed, expected, shape, tokens, write
from headstock_qwen.families import QWEN3

# Maps of three sizes, none of them square, in groups of 16 and 32.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make(tmp_path: Path, scheme: str, name: str = "qwen3", plain: tuple[str, ...] = ()) -> Path:
    """A model with these numbers in `tmp_path`; where it is packed."""
    changes = SIZES if name == "qwen3" else {}
    write(tmp_path, shape(name, **changes))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme], plain=plain)
    return tmp_path / "packed"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shard", often(1, [Shard(index=1, count=2), WHOLE]), ids=["half", "whole"])
def test_parameters_are_the_numbers_of_the_format(
    scheme: str, shard: Shard, tmp_path: Path
) -> None:
    packed = make(tmp_path, scheme)
    plain, found = load_rank(tmp_path, shard), load_rank(packed, shard)

    assert plain.keys() == found.keys()
    for name, weight in plain.items():
        assert torch.equal(found[name].tensor, weight.tensor), name


@pytest.mark.parametrize("scheme", often(1, ["gptq zeros", *SCHEMES]))
def test_a_packed_model_has_the_scores_of_its_numbers(scheme: str, tmp_path: Path) -> None:
    packed, prompt = make(tmp_path, scheme, plain=("v_proj",)), tokens(20)
    found = log_probabilities(packed, QWEN3, prompt, TorchOps())
    torch.testing.assert_close(found, expected(tmp_path, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", often(2, ["awq", "ct nvfp4", *SCHEMES]))
def test_experts_are_packed_too(scheme: str, tmp_path: Path) -> None:
    write(tmp_path, shape("qwen3_moe", **SIZES, moe_intermediate_size=32))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme])
    plain, found = load_rank(tmp_path), load_rank(tmp_path / "packed")

    for name, weight in plain.items():
        assert torch.equal(found[name].tensor, weight.tensor), name


class ExpertsTaken(TorchOps):
    """Takes packed experts, notes their formats, and makes them plain."""

    def __init__(self) -> None:
        self.formats: list[WeightFormat] = []

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        return spec.roles == {Role.EXPERTS}

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        if weight.format is None:
            return weight
        self.formats.append(weight.format)
        out = torch.empty(spec.shape)
        dequantize_(weight, out)
        return Weight(tensor=out, bias=weight.bias)


@pytest.mark.parametrize("scheme", often(2, ["ct fp8 block", "ct w4a16 zeros", *SCHEMES]))
@pytest.mark.parametrize(
    "shard", [WHOLE, Shard(index=1, count=2), Shard(index=1, count=2, by_expert=True)], ids=str
)
def test_experts_stay_packed_where_the_operations_take_them(
    scheme: str, shard: Shard, tmp_path: Path
) -> None:
    write(tmp_path, shape("qwen3_moe", **SIZES, moe_intermediate_size=64))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme])
    ops = ExpertsTaken()
    plain, found = load_rank(tmp_path, shard), load_rank(tmp_path / "packed", shard, ops)

    for name, weight in plain.items():
        assert torch.equal(found[name].tensor, weight.tensor), name
    if scheme in ("ct fp8 block", "ct w4a16 zeros"):
        assert len(ops.formats) == 4  # gate and up, and down, of two layers


def test_a_text_decoder_may_say_how_its_weights_are_packed(tmp_path: Path) -> None:
    hf = next(case for case in WRAPPED if case.model_type == "mistral3").hf
    write(tmp_path, hf)
    towers = ("vision_tower", "projector")
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES["fp8 tensor"], plain=towers)
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))

    packed = computed(tmp_path / "packed", tokens(20))
    torch.testing.assert_close(packed, computed(tmp_path, tokens(20)), atol=1e-4, rtol=0)
    assert read_model(tmp_path / "packed")[1].ignored_fields == ()


KINDS = {
    "phi3": {},  # one tensor for q, k and v, and one for gate and up
    "deepseek_v3": {},  # latent attention, experts, and an expert for every token
    "lfm2_moe": {},  # convolutions
    "qwen2_moe": {"decoder_sparse_step": 2},
    "gemma2": {},
}
"""Families whose maps lie otherwise than Qwen3's."""


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, scheme) for name in KINDS for scheme in ("ct fp8 channel", "gptq zeros")),
        *(
            pytest.param(name, scheme, marks=pytest.mark.full)
            for name in KINDS
            for scheme in SCHEMES
        ),
    ],
)
def test_every_kind_of_family_is_read(name: str, scheme: str, tmp_path: Path) -> None:
    case = Case(name, {**KINDS[name], **NEW})
    write(tmp_path, case.hf)
    tensors = load_file(tmp_path / "model.safetensors")
    # What words and groups of 32 do not divide stays as it is.
    odd = tuple(
        key
        for key, tensor in tensors.items()
        if tensor.dim() != 2 or tensor.shape[1] % 32 or tensor.shape[0] % 8
    )
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme], plain=odd)
    assert len(load_file(tmp_path / "packed" / "model.safetensors")) > len(tensors)
    plain, found = load_rank(tmp_path), load_rank(tmp_path / "packed")

    assert plain.keys() == found.keys()
    for key, weight in plain.items():
        assert torch.equal(found[key].tensor, weight.tensor), key


def test_words_are_those_of_the_formats_authors() -> None:
    # compressed-tensors packs -8 to -1 so, after it has added 8.
    numbers = torch.arange(8)[None]
    assert pack_words(numbers, 4).item() == 0x76543210


DOWN = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        ("gptq", "scales", lambda t: t[:3], r"scales: expected shape \[6, 64\], got \[3, 64\]"),
        ("gptq", "scales", None, r"qweight is there, and .*scales is missing"),
        ("gptq", "qweight", None, r"\(I32\) is there, and .*qweight is missing"),
        ("gptq", "qweight", lambda t: t.float(), r"qweight: expected I32 .*got F32"),
        ("gptq", "qweight", lambda t: t[:8], r"expected shape \[4, 64\], got \[6, 64\]"),
        ("gptq", "qzeros", lambda t: t + 1, r"qzeros: expected zeros of 8, as sym is true"),
        ("gptq", "g_idx", lambda t: t[:5], r"g_idx: expected shape \[96\], got \[5\]"),
        ("gptq", "g_idx", lambda t: t * 0, r"g_idx: expected 16 columns of each group"),
        ("gptq", "g_idx", lambda t: t - 5, r"g_idx: expected 16 columns of each group"),
        ("gptq", "scales", lambda t: t / 0, r"scales holds scales that are NaN or infinite"),
        ("gptq", "g_idx", lambda t: t.flip(0), r"g_idx: expected columns in order, as desc_act is"),
        ("gptq zeros", "qzeros", None, r"qweight is there, and .*qzeros is missing"),
        ("awq", "qzeros", None, r"qweight is there, and .*qzeros is missing"),
        ("awq", "scales", lambda t: t.int(), r"scales: expected one of BF16, F16, F32, got I32"),
        ("ct w4a16", "weight_scale", None, r"weight_packed is there, and .*scale is missing"),
        ("ct w4a16", "weight_shape", lambda t: t + 1, r"weight_shape: expected \[64, 96\], got"),
        ("ct w4a16", "weight_packed", lambda t: t[0], r"weight_packed: expected I32 of two"),
        ("ct w4a16", "weight_packed", None, r"weight_\w+ .*is there, and .* is missing"),
        (
            "ct int8",
            "weight_scale",
            lambda t: t[:9],
            r"_scale: expected shape .*got \[9, 1\]",
        ),
        (
            "ct fp8 channel",
            "weight_scale",
            lambda t: -t,
            r"_scale holds scales .*not above 0",
        ),
        ("ct nvfp4", "weight_global_scale", lambda t: t * 0, r"global_scale holds scales"),
        ("ct nvfp4", "weight_scale", lambda t: t.float(), r"weight_scale: expected one of F8_E4M3"),
        ("modelopt nvfp4", "weight_scale_2", None, r"weight is U8, and .*scale_2 is missing"),
        ("modelopt fp8", "weight_scale", None, r"weight is F8_E4M3, and .*_scale is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    scheme: str, name: str, change: object, message: str, tmp_path: Path
) -> None:
    packed = make(tmp_path, scheme)
    found = load_file(packed / "model.safetensors")
    if change is None:
        del found[f"{DOWN}{name}"]
    else:
        assert callable(change)
        found[f"{DOWN}{name}"] = change(found[f"{DOWN}{name}"]).contiguous()
    save_file(found, packed / "model.safetensors")

    with pytest.raises(ModelError, match=message) as error:
        load_rank(packed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("scheme", "fields", "message"),
    [
        ("gptq", {"bits": 3}, "bits: expected 4 or 8, got 3"),
        ("gptq", {"bits": None}, "bits: expected 4 or 8, got None"),
        ("gptq", {"group_size": 0}, "group_size: expected -1 or a number above 0, got 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq or gptq_v2"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format: expected False, got True"),
        ("awq", {"version": "gemv"}, "version: expected gemm or GEMM, got 'gemv'"),
        ("awq", {"bits": 8}, "bits: expected 4, got 8"),
        ("ct int8", {"format": "marlin-24"}, "format: expected dense or .*got 'marlin-24'"),
        ("ct int8", {"config_groups": []}, "config_groups: expected weights in one of them"),
        ("ct int8", {"config_groups": [1]}, "config_groups: expected an object, got list"),
        ("ct int8", {"config_groups": {"a": {"weights": 3}}}, "config_groups.a.weights: expected"),
        (
            "ct int8",
            {"config_groups": {"a": {"weights": {"num_bits": 2}}}},
            "config_groups.a.weights.num_bits: expected 4 or 8, got 2",
        ),
        ("ct int8", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: expected"),
        ("ct int8", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: exp"),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo: expected FP8 or NVFP4, got"),
        ("modelopt fp8", {"quant_algo": None}, "quant_algo: expected FP8 or NVFP4, got 'none'"),
    ],
)
def test_configurations_that_are_not_read_are_named(
    scheme: str, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    packed = make(tmp_path, scheme)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= fields
    (packed / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=f"quantization_config: {message}"):
        read_model(packed)


def test_modelopt_may_say_it_beside_the_configuration(tmp_path: Path) -> None:
    packed = make(tmp_path, "modelopt fp8")
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (packed / "hf_quant_config.json").write_text(json.dumps(said))

    plain, found = load_rank(tmp_path), load_rank(packed)
    assert all(torch.equal(found[name].tensor, each.tensor) for name, each in plain.items())

    said["quantization"]["quant_algo"] = "INT4_AWQ"
    (packed / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json in .*: quant_algo: expected FP8"):
        read_model(packed)
