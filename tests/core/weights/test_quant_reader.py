"""Block FP8 is what it stands for, and what is not served is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import quantize, quantize_directory
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from headstock.config import EngineConfig
from headstock.errors import ModelError
from headstock.spi import Weight, WeightFormat, WeightKind
from headstock.startup.model_loading import read_model
from headstock.startup.weight_notes import describe_weights
from headstock.weights import load_weights
from headstock.weights.quantization import QUANTIZATION_FIELDS, dequantize_, find_quant_reader
from headstock_conformance.model import parity

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}
NAME = "model.layers.1.mlp.down_proj.weight"


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.data(),
)
def test_any_part_of_a_packed_matrix_is_value_times_scale(
    rows: int, columns: int, block: tuple[int, int], data: st.DataObject
) -> None:
    values, scales, expected = quantize(torch.randn(rows, columns), block)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    part = expected[row : data.draw(st.integers(row + 1, rows)), column:]
    weight = Weight(
        tensor=values,
        scales=scales,
        format=WeightFormat(kind=WeightKind.FP8_E4M3, group=block),
    )

    out = torch.empty(part.shape)
    dequantize_(weight, out, (row, column))

    assert torch.equal(out, part)


def test_one_scale_is_for_all_numbers_and_stacks_have_their_own() -> None:
    stack = [quantize(torch.randn(9, 5) * 10**i, (4, 2)) for i in range(3)]
    values, scales, expected = (torch.stack(each) for each in zip(*stack, strict=True))
    out = torch.empty(3, 9, 5)

    group = WeightFormat(kind=WeightKind.FP8_E4M3, group=(4, 2))
    dequantize_(Weight(tensor=values, scales=scales, format=group), out)
    assert torch.equal(out, expected)

    one = WeightFormat(kind=WeightKind.FP8_E4M3)
    dequantize_(Weight(tensor=values, scales=torch.tensor(0.5), format=one), out)
    assert torch.equal(out, values.float() * 0.5)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"block": (16, 8)}),
        ({}, {"block": (128, 128), "powers": True, "scale_fmt": "ue8m0", "files": 3}),
        ({}, {"block": (16, 32), "powers": True, "change": lambda s: s.bfloat16()}),
        ({}, {"block": (7, 5), "powers": True, "change": lambda s: s.to(torch.float8_e8m0fnu)}),
        (
            {"attention_bias": True, "tie_word_embeddings": True},
            {"block": (16, 16), "plain": ("o_proj",), "modules_to_not_convert": ["o_proj"]},
        ),
    ],
    ids=["blocks", "shards", "bfloat16", "e8m0", "plain-modules"],
)
def test_log_probabilities_are_those_of_the_dequantized_weights(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    parity.write(plain, parity.shape("qwen3", **changes))
    quantize_directory(plain, packed, **settings)
    prompt = parity.tokens(19)

    found = parity.computed(packed, prompt)

    torch.testing.assert_close(found, parity.expected(plain, prompt), atol=1e-4, rtol=0)
    # To the bit, as the loader is: the same weights give the same products.
    assert torch.equal(found, parity.computed(plain, prompt))


def test_experts_in_fp8(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    parity.write(plain, parity.shape("qwen3_moe"))
    quantize_directory(plain, packed, (16, 16), files=2)
    prompt = parity.tokens(9)

    assert "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv" in load_file(
        packed / "part-0.safetensors"
    ) | load_file(packed / "part-1.safetensors")
    assert torch.equal(parity.computed(packed, prompt), parity.computed(plain, prompt))


def packed_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the maps of all layers in FP8, in blocks of 4 x 4."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name:
            found[name], found[f"{name}_scale_inv"], _ = quantize(tensor, (4, 4))
    return found


Change = Callable[[dict[str, Tensor]], None]


def replace(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    """A change of one tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name])

    return change


def damage(value: float) -> Change:
    """One scale with another value."""

    def write(scales: Tensor) -> Tensor:
        scales[0, 0] = value
        return scales

    return replace(f"{NAME}_scale_inv", write)


SCALES = f"{NAME}_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALES), f"{NAME} is F8_E4M3, and {SCALES} is missing"),
        (lambda t: t.pop(NAME), f"{SCALES} (F32) is there, and {NAME} is missing"),
        (
            replace(NAME, lambda w: w.float()),
            f"{SCALES} is there, but {NAME} is F32 and needs none",
        ),
        (
            replace(SCALES, lambda s: s.T.contiguous()),
            f"{SCALES}: expected shape [2, 3], got [3, 2]",
        ),
        (replace(SCALES, lambda s: s.double()), f"{SCALES}: expected one of BF16, F16"),
        (replace(NAME, lambda w: w.T.contiguous()), f"{SCALES}: expected shape [3, 2]"),
        (damage(float("nan")), f"{SCALES} holds scales"),
        (damage(float("inf")), "holds scales that are NaN, infinite or not above 0"),
        (damage(0.0), "holds scales that are NaN, infinite or not above 0"),
        (damage(-1.0), "holds scales that are NaN, infinite or not above 0"),
        (damage(3e38), f"{NAME} in "),
        (
            replace(NAME, lambda w: w.float().fill_(torch.nan).to(torch.float8_e4m3fn)),
            "holds NaN or infinite numbers as float32",
        ),
        (
            replace("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)),
            "model.norm.weight is F8_E4M3, and model.norm.weight_scale_inv is missing",
        ),
        (
            replace("model.norm.weight", lambda w: w.to(torch.float8_e5m2)),
            "model.norm.weight: expected one of F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Change, message: str, write: Any, loading: Any, tensors: dict[str, Tensor]
) -> None:
    packed = packed_tensors(tensors)
    change(packed)
    directory = write(packed, quantization_config=FP8)

    with pytest.raises(ModelError) as error:
        load(directory)

    assert message in str(error.value)
    assert "\n" not in str(error.value)


def load(directory: Path) -> Any:
    """The parameters in float32."""
    family, config = read_model(directory)
    return load_weights(
        directory,
        family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=20,
    )


def test_modules_that_are_not_to_be_quantized(write: Any, tensors: dict[str, Tensor]) -> None:
    for names in ({"modules_to_not_convert": ["down_proj"]}, {"ignored_layers": [NAME[:-7]]}):
        directory = write(packed_tensors(tensors), quantization_config={**FP8, **names})
        with pytest.raises(ModelError, match=r"but quantization_config says that .* not quantized"):
            load(directory)


def test_scales_of_activations_and_of_keys_and_values_are_not_leftovers(
    write: Any, tensors: dict[str, Tensor]
) -> None:
    packed = packed_tensors(tensors)
    packed |= {
        f"model.layers.1.{name}": torch.ones(())
        for name in ("self_attn.k_scale", "self_attn.v_scale", "mlp.down_proj.input_scale")
    }
    first = load(write(packed, quantization_config=FP8))["layers.1.down"].tensor

    assert torch.equal(first, quantize(tensors[NAME], (4, 4))[2])


def test_what_is_said_of_weights_is_how_they_are_packed_and_who_takes_them(
    write: Any, tensors: dict[str, Tensor]
) -> None:
    packed = packed_tensors(tensors)
    plain = write(packed, quantization_config=FP8)
    config = EngineConfig(model=str(plain))

    def describe(kind: WeightKind | None = None) -> str:
        """What is said of weights where `fa` takes such numbers alone."""
        return describe_weights(config, plain, "bfloat16", "fa", lambda format: format.kind is kind)

    text = describe()
    assert text == "block FP8 (4 x 4), dequantized to bfloat16 at load"
    assert describe(WeightKind.FP8_E4M3) == (
        f"{text}, but for what fa multiplies by as it is stored"
    )


def test_one_scale_a_tensor(write: Any, tensors: dict[str, Tensor]) -> None:
    expected = {}
    for name in [name for name in tensors if "_proj" in name]:
        values, scales, expected[name] = quantize(tensors[name], (100, 100))
        tensors |= {name: values, f"{name}_scale": scales.view(())}

    params = load(write(tensors, quantization_config={"quant_method": "fp8"}))

    assert torch.equal(params["layers.1.down"].tensor, expected[NAME])


def test_without_a_format_fp8_is_not_read(write: Any, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ModelError, match=r"unexpected .*scale_inv"):
        load(write(packed_tensors(tensors)))


def test_a_file_of_an_unknown_type_is_refused(write: Any, tensors: dict[str, Tensor]) -> None:
    directory = write(tensors, quantization_config=FP8)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F4X"', 1))

    with pytest.raises(ModelError, match=r"expected one of .*F8_E4M3.* got F4X"):
        load(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size: expected two .* got \[128\]"),
        ({"weight_block_size": [0, 8]}, r"weight_block_size: expected two .* got \[0, 8\]"),
        ({"fmt": "e5m2"}, r"fmt: expected e4m3 or float8_e4m3fn, got .*e5m2"),
        ({"activation_scheme": "odd"}, r"activation_scheme: expected dynamic or static, got .*odd"),
        ({"scale_fmt": "e3m0"}, r"scale_fmt: expected float or ue8m0, got .*e3m0"),
        (
            {"modules_to_not_convert": "lm_head"},
            r"modules_to_not_convert: expected .*lm_head",
        ),
        ({"ignored_layers": [1]}, r".*ignored_layers: expected .* got .*1"),
    ],
)
def test_fields_that_cannot_be_served_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^quantization_config: {message}"):
        find_quant_reader({"quantization_config": {**FP8, **fields}})


def test_unknown_fields_are_reported(
    write: Any, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    read_model(write(packed_tensors(tensors), quantization_config={**FP8, "rotation": "hadamard"}))

    assert "quantization_config.rotation" in caplog.text


@pytest.mark.parametrize("field", QUANTIZATION_FIELDS)
def test_weights_by_an_unknown_method_are_refused(
    field: str, write: Any, tensors: dict[str, Tensor]
) -> None:
    assert find_quant_reader({field: None}) is None
    # Before weights load: there are none.
    directory = write(tensors, **{field: {"bits": 4}})
    (directory / "model.safetensors").unlink()

    wanted = f"{field} says that the weights are quantized, and only fp8, .* are read; use"
    with pytest.raises(ModelError, match=wanted):
        read_model(directory)


def test_what_a_text_decoder_says_counts_where_the_whole_says_nothing() -> None:
    text = {"quantization_config": {"quant_method": "quark"}}

    with pytest.raises(ValueError, match=r"^text_config\.quantization_config says .* by quark"):
        find_quant_reader({"text_config": text})
    assert find_quant_reader({"text_config": text, "quantization_config": FP8}) is not None


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        *(
            ({"quant_method": name, "bits": 4}, name)
            for name in ("quark", "torchao", "hqq", "bitsandbytes")
        ),
        ({"load_in_8bit": True, "quant_method": None}, "bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_a_quantized_checkpoint_is_refused_with_its_method(
    quantization: dict[str, Any], method: str
) -> None:
    with pytest.raises(
        ValueError,
        match=f"^quantization_config says that the weights are quantized by {method}, and ",
    ):
        find_quant_reader({"quantization_config": quantization})
