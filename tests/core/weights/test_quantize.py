"""What `--quant` makes of plain maps, and what stays packed of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve
from families import NEW, Case, load_paged
from hypothesis import given, settings
from hypothesis import strategies as st
from load_rank import load_rank
from quantized_checkpoints import SCHEMES, write_quantized

from headstock import registry
from headstock.ops.fbgemm_ops import FbgemmOps, HalfWeight
from headstock.ops.packed_cpu import Int4Weight, Int8Weight
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ParamSpec, Role, Shard, Weight, WeightFormat, WeightKind
from headstock.startup.model_loading import read_model
from headstock.text.tokenizer import Tokenizer
from headstock.weights.quantization import choose_format, dequantize_, quantize
from headstock_conformance.model.parity import shape, write

KINDS = (WeightKind.FP8_E4M3, WeightKind.INT8, WeightKind.INT4)
LARGEST_ERROR = {WeightKind.FP8_E4M3: 2.0**-4, WeightKind.INT8: 0.5 / 127, WeightKind.INT4: 0.1}
"""Of a number, as a share of the largest of its row or of the range of its group."""


def make_spec(*shape: int, role: Role = Role.LINEAR) -> ParamSpec:
    return ParamSpec(shape=shape, roles=frozenset({role}))


def restore(weight: Weight, shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape)
    dequantize_(weight, out)
    return out


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 9),
    columns=st.sampled_from([32, 64, 96, 128, 384]),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
)
def test_numbers_are_near_those_that_they_stand_for(
    kind: WeightKind, rows: int, columns: int, seed: int, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(rows, columns, generator=generator) * size
    plain[0, : columns // 2] = 0.0
    plain[-1] = plain[-1].abs()
    format = choose_format(kind, make_spec(rows, columns))
    assert format is not None
    assert format.group is not None

    packed = quantize(plain, format)

    groups = plain.view(rows, -1, format.group[1])
    widths = groups.clamp(min=0).amax(-1) - groups.clamp(max=0).amin(-1)
    if kind is not WeightKind.INT4:
        widths = groups.abs().amax(-1)
    most = widths.repeat_interleave(format.group[1], 1) * LARGEST_ERROR[kind]
    error = (restore(packed, plain.shape) - plain).abs()
    # Outliers of 4 bits are cut where others gain more.
    if kind is WeightKind.INT4:
        assert (error.square().mean(1) <= most.square().mean(1) + 1e-20).all()
    else:
        assert (error <= most * 1.001 + 1e-20).all()
    assert torch.equal(quantize(plain[-1:], format).tensor, packed.tensor[-1:])


def test_maps_alone_are_packed() -> None:
    for kind in KINDS:
        for role in set(Role) - {Role.LINEAR}:
            assert choose_format(kind, make_spec(64, 128, role=role)) is None
        experts = choose_format(kind, make_spec(3, 64, 128, role=Role.EXPERTS))
        assert experts == choose_format(kind, make_spec(64, 128)) is not None
        assert choose_format(kind, make_spec(3, 64, 128)) is None
        tied = ParamSpec(shape=(8, 128), roles=frozenset({Role.EMBEDDING, Role.HEAD}))
        assert choose_format(kind, tied) is None
    assert choose_format(WeightKind.INT4, make_spec(8, 100)) is None
    for columns, group in ((256, 128), (192, 64), (96, 32)):
        format = choose_format(WeightKind.INT4, make_spec(8, columns))
        assert format == WeightFormat(kind=WeightKind.INT4, group=(1, group), has_zeros=True)


TEXT = (
    "Once upon a time, there was a little girl named Sara. She lived in an old mill. One morning, "
    'Hugo the squirrel gave Sara a pair of gloves. "Please take it to Theo the dragon at the '
    'river." "The winter will be cold," said Hugo. So Sara set out for the river. The way was '
    "long, and it rained, but she kept the pair of gloves dry under her coat."
)
# Of the mean KL to the model's own probabilities; what was measured is a third to a half of it.
MOST_KL = {WeightKind.FP8_E4M3: 1e-3, WeightKind.INT8: 1e-4, WeightKind.INT4: 3e-3}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_the_demo_model_loses_little(kind: WeightKind) -> None:
    directory = Path(registry.load_spec("checkpoint", "demo").directory)
    family, _ = read_model(directory)
    tokens = Tokenizer(directory).encode(TEXT)
    plain, packed = (
        load_paged(directory, family, FbgemmOps(), len(tokens), quant)
        .step({0: tokens})
        .log_softmax(-1)
        for quant in (None, kind)
    )
    divergence = (plain.exp() * (plain - packed)).sum(-1).mean()
    assert 0 < divergence < MOST_KL[kind], divergence


def test_what_chooses_experts_stays_plain() -> None:
    case = Case("qwen2_moe", {"decoder_sparse_step": 1})
    family, config = case.family, case.family.config(case.hf)
    specs = family.params(config)
    packed = {name for name, spec in specs.items() if choose_format(WeightKind.INT8, spec)}

    assert {"layers.0.router", "layers.0.shared_gate"} <= specs.keys() - packed
    assert {"layers.0.qkv", "layers.0.shared_down"} <= packed


STAYS = {
    "ct fp8 channel": HalfWeight,
    "ct fp8 tensor": HalfWeight,
    "ct int8": Int8Weight,
    "ct w4a16 zeros": Int4Weight,
    "gptq second edition": Int4Weight,
}
"""Schemes whose maps `fbgemm` takes, and what it makes of them."""


class KeptExperts(TorchOps):
    """Experts stay packed."""

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        return spec.roles == {Role.EXPERTS}


class KeptMaps(TorchOps):
    """Everything stays packed."""

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        return True


@pytest.mark.parametrize(
    "scheme", ["ct w4a16 zeros", "ct mxfp4", "ct nvfp4", "gptq", "gptq zeros", "awq", "gptq order"]
)
@pytest.mark.parametrize(
    "shard", [Shard(), Shard(index=1, count=2), Shard(index=1, count=2, by_expert=True)], ids=str
)
def test_experts_of_4_bits_stay_packed_with_the_same_numbers(
    scheme: str, shard: Shard, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4}
    write(tmp_path, shape("qwen3_moe", **sizes, head_dim=32, num_key_value_heads=2))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme], plain=("self_attn",))

    plain = load_rank(tmp_path, shard, TorchOps())
    kept = load_rank(tmp_path / "packed", shard, KeptExperts())

    for name in ("experts_gate_up", "experts_down"):
        weight, wanted = kept[f"layers.1.{name}"], plain[f"layers.1.{name}"].tensor
        # No product takes columns in another order.
        assert (weight.format is None) is (scheme == "gptq order"), name
        numbers = weight.tensor if weight.format is None else restore(weight, wanted.shape)
        torch.testing.assert_close(numbers, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_experts_are_packed_where_operations_take_them(kind: WeightKind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4}
    write(tmp_path, shape("qwen3_moe", **sizes, head_dim=32, num_key_value_heads=2))

    plain = load_rank(tmp_path, quant=kind)
    kept = load_rank(tmp_path, ops=KeptExperts(), quant=kind)

    for name, weight in kept.items():
        if "experts" not in name:
            assert weight.format is None
            continue
        assert weight.format is not None and weight.format.kind is kind
        wanted = plain[name].tensor
        for found, each in zip(restore(weight, wanted.shape), wanted, strict=True):
            alone = restore(quantize(each, weight.format), each.shape)
            assert torch.equal(found, alone)


@pytest.mark.feature("V4")
@pytest.mark.parametrize("scheme", ["ct fp8 channel", "ct int8", "ct w4a16 zeros", "gptq", "awq"])
def test_random_weights_are_packed_as_the_configuration_says(scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    write(tmp_path, shape("qwen3", **sizes, head_dim=32, num_key_value_heads=2))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme])
    for file in (tmp_path / "packed").glob("*.safetensors"):
        file.unlink()

    plain = load_rank(tmp_path / "packed", dummy=True)
    kept, again = (load_rank(tmp_path / "packed", ops=KeptMaps(), dummy=True) for _ in range(2))

    for name, weight in kept.items():
        is_map = name.split(".")[-1] in ("qkv", "attn_out", "gate_up", "down")
        assert (weight.format is not None) is is_map, name
        assert torch.equal(weight.tensor.float(), again[name].tensor.float())
        if is_map:
            numbers = restore(weight, plain[name].tensor.shape)
            assert 0.015 < numbers.std() < 0.025 and numbers.isfinite().all()


@pytest.mark.feature("V4")
def test_random_experts_are_packed_as_the_configuration_says(tmp_path: Path) -> None:
    write(tmp_path, Case("gpt_oss", {"hidden_size": 64, "intermediate_size": 64, **NEW}).hf)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    kept = load_rank(tmp_path, ops=KeptMaps(), dummy=True)

    format = WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32))
    assert {name for name, weight in kept.items() if weight.format} == {
        f"layers.{layer}.experts_{part}" for layer in range(3) for part in ("gate_up", "down")
    }
    weight = kept["layers.1.experts_down"]
    assert weight.format == format and weight.bias is not None
    assert 0.015 < restore(weight, (*weight.tensor.shape[:2], 64)).std() < 0.03


@pytest.mark.parametrize("scheme", STAYS)
@pytest.mark.parametrize("index", [0, 1, None], ids=["first half", "second half", "whole"])
def test_what_operations_take_stays_packed_with_the_same_numbers(
    scheme: str, index: int | None, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    write(tmp_path, shape("qwen3", **sizes, head_dim=32, num_key_value_heads=2))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme])
    shard = Shard() if index is None else Shard(index=index, count=2)
    plain, packed = (
        load_rank(tmp_path, shard, TorchOps()),
        load_rank(tmp_path / "packed", shard, FbgemmOps()),
    )

    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    for name in ("qkv", "attn_out", "gate_up", "down"):
        weight, expected = packed[f"layers.1.{name}"], plain[f"layers.1.{name}"].tensor
        assert type(weight) is STAYS[scheme], name
        rows = x[:, : expected.shape[1]].contiguous()
        ours = FbgemmOps().linear(rows, weight, None)
        # Rows have 8 bits beside INT8, and bfloat16 beside INT4.
        error = (ours - rows @ expected.t()).norm() / (rows @ expected.t()).norm()
        assert error < (2e-2 if "int8" in scheme else 6e-3), name
    assert packed["lm_head"].format is None
    assert not isinstance(packed["lm_head"], Int4Weight | Int8Weight)


def test_parts_in_several_formats_are_made_plain(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    write(tmp_path, shape("qwen3", **sizes, head_dim=32, num_key_value_heads=2))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES["ct int8"], plain=("k_proj", "o_proj"))
    packed = load_rank(tmp_path / "packed", Shard(), FbgemmOps())

    kinds = {name: type(packed[f"layers.0.{name}"]) for name in ("qkv", "attn_out", "gate_up")}
    assert kinds["gate_up"] is Int8Weight
    assert Int8Weight not in (kinds["qkv"], kinds["attn_out"])


@settings(max_examples=25)
@given(
    rows=st.sampled_from([16, 48, 160]),
    columns=st.sampled_from([64, 128, 256]),
    tokens=st.integers(1, 40),
    kind=st.sampled_from([WeightKind.INT8, WeightKind.INT4]),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_product_is_the_same_by_itself_and_in_a_batch(
    rows: int, columns: int, tokens: int, kind: WeightKind, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = choose_format(kind, make_spec(rows, columns))
    assert format is not None
    plain, bias = torch.randn(rows, columns, generator=generator), torch.randn(rows)
    weight = evolve(quantize(plain, format), bias=bias)
    ops = FbgemmOps()
    assert ops.takes_format(make_spec(rows, columns), format)
    prepared = ops.prepare(make_spec(rows, columns), weight)
    # Rows of very different sizes, which share no scale.
    x = torch.randn(tokens, columns, generator=generator)
    x *= 10.0 ** torch.randint(-4, 4, (tokens, 1), generator=generator)
    x[0] = 0.0

    whole = ops.linear(x, prepared, None)

    for at in range(tokens):
        assert torch.equal(ops.linear(x[at : at + 1], prepared, None)[0], whole[at])
    assert torch.equal(whole[0], bias)
    expected = x @ restore(weight, plain.shape).t()
    error = (whole - bias - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    assert (error[1:] < 4e-2).all()
    assert prepared.nbytes < plain.nbytes / 2
