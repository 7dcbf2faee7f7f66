"""`headstock models`, and what is said of weights that are large."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import headstock_demo
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.doctor import local_models
from headstock.doctor.environment import inspect_environment
from headstock.spi import ParamSpec, Role, WeightKind
from headstock.startup import weight_sizes
from headstock.weights import choose_format
from headstock.weights.quantization import quantize

CHECKPOINT = Path(headstock_demo.__file__).parent / "checkpoint"


def cache(hub: Path, name: str, *, changes: dict[str, Any] | None = None, cut: int = 0) -> None:
    """Put a copy of the demo model into a cache of the hub, changed or cut off."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    shutil.copytree(CHECKPOINT, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    config = snapshot / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | (changes or {})))
    weights = snapshot / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: -cut or None])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def list_models(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, tuple[bool, str]]:
    assert main(["models", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    return {each["name"]: (each["runs"], each["how"]) for each in found}


def test_models_that_are_here_are_listed_with_what_keeps_them_from_running(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache(hub, "org/good")
    cache(hub, "org/cut", cut=1000)
    cache(hub, "org/new", changes={"architectures": ["BrandNewForCausalLM"]})
    found = list_models(capsys)
    assert found["demo"] == found["org/good"] == (True, "")
    assert found["org/cut"][0] is False and "model.safetensors" in found["org/cut"][1]
    assert found["org/new"][0] is False and "BrandNewForCausalLM" in found["org/new"][1]

    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "size", "architecture", "runs", "here"]
    (good,) = (line for line in lines if line.startswith("org/good "))
    assert good.split()[-2:] == ["Qwen3ForCausalLM", "yes"]


def test_a_model_that_fits_only_in_fewer_bits_is_said_to(
    hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for room, expected in ((15 << 20, (True, "--quant int8")), (1 << 20, (False, None))):
        monkeypatch.setattr("headstock.doctor.local_models.free_bytes", lambda _, n=room: n)
        runs, how = list_models(capsys, "--memory-ratio", "1")["demo"]
        assert runs is expected[0]
        assert how == expected[1] or (not runs and "and 1.0 MiB are free" in how)


def test_no_quantization_is_offered_where_operations_may_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_models, "free_bytes", lambda _: 15 << 20)
    environment = inspect_environment(EngineConfig(model="demo", memory_ratio=1.0))
    assert local_models._find_room(environment) == (True, "--quant int8")
    gpu = evolve(environment, env=evolve(environment.env, device="cuda"))
    runs, how = local_models._find_room(gpu)
    assert not runs and "15.0 MiB are free" in how


def test_nothing_but_what_is_installed_is_listed_without_a_cache(
    hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub / "none"))
    assert list_models(capsys).keys() == {"demo"}


def linear(rows: int, columns: int) -> ParamSpec:
    return ParamSpec(shape=(rows, columns), roles=frozenset({Role.LINEAR}), sources=(("w",),))


@given(
    st.integers(1, 5),
    st.sampled_from([32, 64, 96, 128, 256, 40]),
    st.sampled_from([WeightKind.INT8, WeightKind.INT4, WeightKind.FP8_E4M3]),
)
def test_bytes_are_counted_as_quantizing_makes_them(
    rows: int, columns: int, kind: WeightKind
) -> None:
    spec = linear(rows, columns)
    format = choose_format(kind, spec)
    if format is None:
        wanted = rows * columns * 2
    else:
        weight = quantize(torch.randn(rows, columns), format)
        tensors = (weight.tensor, weight.scales, weight.zeros)
        wanted = sum(each.nbytes for each in tensors if each is not None)
    assert weight_sizes.count_weight_bytes([spec], "bfloat16", kind) == wanted


@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4, WeightKind.FP8_E4M3])
def test_experts_take_the_bytes_of_as_many_maps(kind: WeightKind) -> None:
    experts = ParamSpec(shape=(3, 96, 256), roles=frozenset({Role.EXPERTS}), sources=(("w",),))
    each = weight_sizes.count_weight_bytes([linear(96, 256)], "bfloat16", kind)
    assert weight_sizes.count_weight_bytes([experts], "bfloat16", kind) == 3 * each
    assert weight_sizes.suggest_quant([experts], "bfloat16", lambda *_: True, 1 << 20)


def test_int8_is_offered_for_large_models_whose_maps_it_makes_smaller() -> None:
    large, other = linear(1 << 14, 1 << 15), linear(8, 8)
    offer = weight_sizes.offer_int8([large, other], "float32", lambda spec, _: spec is large)
    assert "quant (--quant) int8 would take 512.1 MiB" in offer and "2.00 GiB" in offer
    assert weight_sizes.offer_int8([large], "float32", lambda *_: False) == ""
    assert weight_sizes.offer_int8([other], "float32", lambda *_: True) == ""


def test_what_does_not_fit_is_told_which_quantization_does() -> None:
    def suggest(free: int) -> str:
        return weight_sizes.suggest_quant([linear(1024, 1024)], "float32", lambda *_: True, free)

    assert suggest(2 << 20) == "int8 (1.0 MiB) or int4 (552.0 KiB)"
    assert suggest(600 << 10) == "int4 (552.0 KiB)"
    assert suggest(1) == ""
