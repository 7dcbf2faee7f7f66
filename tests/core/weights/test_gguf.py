"""A GGUF file is the model that it was made from, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import SCALES, TYPES, Stored, describe, make_blocks, write_gguf, write_plain
from gguf_files import read_stored as read_by_gguf
from load_rank import WHOLE, load_rank
from often import often
from safetensors.torch import load_file, save_file

from headstock.config import EngineConfig
from headstock.errors import ModelError
from headstock.spi import Shard
from headstock.startup.model_loading import read_model
from headstock.startup.weight_notes import describe_weights
from headstock.weights import read_config, resolve_directory
from headstock.weights.gguf.block_types import BLOCK_TYPES
from headstock.weights.stored_tensors import read_stored
from headstock_conformance.model.parity import (
    ARCHITECTURES,
    computed,
    expected,
    shape,
    tokens,
    write,
)

# Rows of whole blocks of 256.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which translations are kept."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make(tmp_path: Path, model: str, name: str, **changes: Any) -> tuple[Path, Path]:
    """A model's directory, and its file in that type."""
    directory, file = tmp_path / "plain", tmp_path / "small.gguf"
    directory.mkdir()
    type, settings = model.split()[0], MODELS[model] | changes
    base = shape(type if type in ARCHITECTURES else "llama")
    write(directory, {**base, "model_type": type, **settings})
    write_gguf(directory, file, name)
    return directory, file


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", SCALES)
def test_blocks_are_the_numbers_of_the_formats_own_library(name: str) -> None:
    pytest.importorskip("gguf")
    number, count, nbytes = TYPES[name]
    stored = Stored(number, (7, 3 * count), make_blocks(name, 21, 0))
    blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(-1, nbytes)

    found = BLOCK_TYPES[number].unpack(blocks).view(7, -1)

    assert torch.equal(found, read_by_gguf(stored))


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", often(3, ["Q8_0", "Q4_K", "Q6_K", *TYPES]))
@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(index=1, count=2)], ids=["whole", "half"])
def test_parameters_are_the_numbers_of_the_file(
    model: str, name: str, shard: Shard, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    directory, file = make(tmp_path, model, name, **WIDE)
    plain, found = load_rank(directory, shard), load_rank(resolve_directory(str(file)), shard)

    assert plain.keys() == found.keys()
    for key, weight in plain.items():
        assert torch.equal(found[key].tensor, weight.tensor), key


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", often(1, ["BF16", "F16", "F32"]))
@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_scores_that_transformers_has_of_its_numbers(
    model: str, name: str, tmp_path: Path
) -> None:
    directory, file = make(tmp_path, model, name)
    prompt = tokens(20)
    translated = resolve_directory(str(file))
    found = computed(translated, prompt)

    assert torch.equal(found, computed(directory, prompt))
    torch.testing.assert_close(found, expected(directory, prompt), atol=1e-4, rtol=0)
    assert (
        read_config(translated)["dtype"]
        == {
            "F32": "float32",
            "F16": "float16",
            "BF16": "bfloat16",
        }[name]
    )


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
        ),
        (LLAMA3, {}),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_positions_are_those_of_the_configuration(
    table: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    base = {"rope_theta": 500000.0, "max_position_embeddings": 16384}
    write(tmp_path, shape("llama", **base, rope_scaling=table))
    keys = {f"llama.rope.scaling.{key}": value for key, value in changes.items()}
    factors = {"rope_freqs.weight": write_plain(llama3_factors(), "F32")} if not changes else {}
    write_gguf(tmp_path, tmp_path / "small.gguf", changes=keys, others=factors)
    directory = resolve_directory(str(tmp_path / "small.gguf"))

    assert read_model(directory)[1].ropes == read_model(tmp_path)[1].ropes
    assert torch.equal(computed(directory, tokens(20)), computed(tmp_path, tokens(20)))


def llama3_factors() -> torch.Tensor:
    """What `LLAMA3` slows each pair of a head of 16 down by, as transformers computes it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = {"rope_theta": 500000.0, "max_position_embeddings": 16384}
    config = LlamaConfig(**shape("llama", **base, rope_scaling=LLAMA3))
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 500000.0 ** -(torch.arange(0, 16, 2) / 16) / slowed


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "t5"}, "the architecture 't5' is not read from GGUF, only llama"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"llama.block_count": 10_000}, "block_count is 10000, and the file has 21 tensors"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.head_count": "four"}, "expected a whole number, not below 0, for all"),
        ({"llama.attention.head_count_kv": [1, 2]}, "for all layers, got a list of 2"),
        ({"llama.attention.value_length": 8}, "expected 16, as of keys, got 8"),
        ({"llama.rope.dimension_count": 8}, "expected 16, a whole head, got 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "got longrope"),
        ({"llama.attention.sliding_window": 4}, "sliding_window is a setting that is not read"),
        ({"split.count": 3}, "it is one part of a model; join all by llama-gguf-split --merge"),
    ],
)
def test_what_is_not_read_is_named_with_its_conversion(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, shape("llama"))
    write_gguf(tmp_path, tmp_path / "small.gguf", changes=changes)
    with pytest.raises(ModelError) as error:
        resolve_directory(str(tmp_path / "small.gguf"))
    assert message in str(error.value) and "or convert it: pip install gguf" in str(error.value)


@pytest.mark.feature("R10")
def test_other_factors_of_positions_and_other_types_are_refused(tmp_path: Path) -> None:
    write(tmp_path, shape("llama"))
    file = tmp_path / "small.gguf"
    for other, message in (
        (write_plain(torch.linspace(1, 8, 8), "F32"), "other factors than those of Llama 3"),
        (Stored(10, (256,), bytes(84)), "rope_freqs.weight is Q2_K, and F32, F16, Q4_0"),
    ):
        write_gguf(tmp_path, file, others={"rope_freqs.weight": other})
        with pytest.raises(ModelError, match=message):
            resolve_directory(str(file))


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("quant", "end"), [("off", ""), ("int8", ", and linear maps quantized to int8")]
)
def test_the_start_says_what_the_file_holds(quant: str | None, end: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    _, file = make(tmp_path, "qwen3", "Q4_K", **WIDE)
    config = EngineConfig(model=str(file), quant=quant)
    directory = resolve_directory(str(file))
    found = describe_weights(config, directory, "float16", "torch", lambda format: False)
    assert found == f"Q4_K of GGUF, dequantized to float16 at load{end}"


@pytest.mark.feature("R10")
def test_a_folder_with_one_file_is_its_model_and_one_of_several_is_named(tmp_path: Path) -> None:
    directory, file = make(tmp_path, "qwen3", "F32")
    folder = tmp_path / "folder"
    folder.mkdir()
    file.rename(folder / "b.gguf")
    (folder / "mmproj-b.gguf").write_bytes(b"x")
    assert resolve_directory(str(folder)) == resolve_directory(str(folder / "b.gguf"))

    (folder / "a.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"has 2 GGUF files; set model .* such as .*a.gguf"):
        resolve_directory(str(folder))
    # Where there are plain weights, these are the model.
    (directory / "c.gguf").write_bytes(b"x")
    assert resolve_directory(str(directory)) == directory


@pytest.mark.feature("R10")
def test_parts_of_a_model_are_refused_with_what_joins_them(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "big-00002-of-00002.gguf"):
        with pytest.raises(ModelError, match=r"part . of 2 of a model.*llama-gguf-split --merge"):
            resolve_directory(str(name))


@pytest.mark.feature("R10")
def test_a_translation_is_kept_until_the_file_changes(tmp_path: Path, home: Path) -> None:
    directory, file = make(tmp_path, "qwen3", "F32")
    first = resolve_directory(str(file))
    assert first.parent == home / ".cache/headstock/gguf"
    written = (first / "config.json").stat().st_mtime_ns
    assert resolve_directory(str(file)) == first
    assert (first / "config.json").stat().st_mtime_ns == written

    write_gguf(directory, file, "F16")
    second = resolve_directory(str(file))
    assert second != first and read_config(second)["dtype"] == "float16"
    # The first one's link leads to the file as it is now.
    with pytest.raises(ModelError, match=r"bytes and had \d+ when it was read first; start again"):
        load_rank(first)


@pytest.mark.feature("R10")
def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path, home: Path) -> None:
    _, file = make(tmp_path, "qwen3", "F32")
    home.write_text("no folder")
    with pytest.raises(ModelError, match=r"cannot be written: .*; set HOME to a folder that can"):
        resolve_directory(str(file))


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": None}, "no proper entry for size and tensors"),
        ({"start": -4}, "no proper entry for a"),
        ({"start": 4000}, "no proper entry for a"),
        ({"start": 2}, "no proper entry for a"),
        ({"shape": [0]}, "no proper entry for a"),
        ({"shape": []}, "no proper entry for a"),
        ({"type": "Q4_K"}, "no proper entry for a"),
        ({"type": "Q2_K"}, "no proper entry for a"),
        ({"rows": [0, 3, 2, [1]]}, "no proper entry for a"),
        ({"rows": [9, 1, 1, [1]]}, "no proper entry for a"),
        ({"rows": [0, 2, 2, []]}, "no proper entry for a"),
        ({"columns": [0, 1, 0, [1]]}, "no proper entry for a"),
        ({"second": {"type": "F32", "shape": [8], "start": 0}}, "no proper entry for a"),
    ],
)
def test_an_index_that_leads_out_of_the_file_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rest = {"rows": None, "columns": None, "offset": 0, "is_rate": False, "second": None}
    entry = {"type": "F32", "shape": [8], "start": 0, **rest, **changes}
    index = {"size": changes.get("size", 64), "tensors": {"a": entry}}
    (tmp_path / "model.gguf").write_bytes(bytes(64))
    (tmp_path / "model.gguf.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        read_stored(tmp_path)


@pytest.mark.feature("R10")
def test_a_file_of_the_formats_own_library_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf")
    hf = shape("qwen3", hidden_size=32, intermediate_size=64)
    write(tmp_path, hf)
    plain = load_file(tmp_path / "model.safetensors")
    names = library.get_tensor_name_map(library.MODEL_ARCH.QWEN3, hf["num_hidden_layers"])
    writer = library.GGUFWriter(tmp_path / "small.gguf", "qwen3")
    for key, value in describe(hf).items():
        if key.startswith("qwen3."):
            kind = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            kind(key, value)
    writer.add_array("general.tags", ["small", "model"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for name, tensor in plain.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        numbers = tensor.float().numpy()
        if tensor.dim() > 1:
            kind = library.GGMLQuantizationType.Q8_0
            blocks = library.quantize(numbers, kind)
            writer.add_tensor(stored, blocks, raw_dtype=kind)
            plain[name] = torch.from_numpy(library.dequantize(blocks, kind).copy())
        else:
            writer.add_tensor(stored, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found, wanted = load_rank(resolve_directory(str(tmp_path / "small.gguf"))), load_rank(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].tensor, wanted[name].tensor) for name in wanted)
