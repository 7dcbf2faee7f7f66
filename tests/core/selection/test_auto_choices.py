"""What `auto` stands for, on each device."""

from __future__ import annotations

import logging

import attrs
import pytest
from core.startup.test_memory_plan import model

from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CannotRun
from headstock.execution.threaded import ThreadedExecutor
from headstock.registry import requirements
from headstock.selection import auto_choices as auto
from headstock.selection.attention_choice import select_attention
from headstock.selection.candidates import select_first_accepted
from headstock.selection.model_needs import resolve_model_dtype
from headstock.spi import DeviceEnv, Rejection

from .test_capabilities import CPU, H200, question

BLACKWELL = ("trtllm", "fi", "fa,fi", "fa", "triton", "sdpa")
AUTO = [
    (CPU, ("sdpa",)),
    (H200, ("fa", "fa,fi", "fi", "triton", "sdpa")),
    (
        DeviceEnv(device="cuda", capability=(10, 0)),
        ("trtllm", "fi", "fa,fi", "fa", "triton", "sdpa"),
    ),
    (
        DeviceEnv(device="cuda", capability=(10, 3)),
        ("trtllm", "fi", "fa,fi", "fa", "triton", "sdpa"),
    ),
    (DeviceEnv(device="cuda", capability=(8, 0)), ("fa,fi", "fi", "fa", "triton", "sdpa")),
    (DeviceEnv(device="cuda", capability=(8, 9)), ("fa,fi", "fi", "fa", "triton", "sdpa")),
    (DeviceEnv(device="cuda", capability=(11, 0)), ("fi", "fa", "triton", "sdpa")),
    (DeviceEnv(device="cuda", capability=(12, 0)), ("fi", "fa", "triton", "sdpa")),
    (DeviceEnv(device="cuda", capability=(7, 5)), ("sdpa",)),
]


@pytest.mark.feature("S14")
@pytest.mark.parametrize(("env", "names"), AUTO)
def test_what_auto_tries_on_each_device(env: DeviceEnv, names: tuple[str, ...]) -> None:
    assert next(names_tried for served, names_tried in auto.ATTENTION if env in served) == names


@pytest.mark.feature("S14")
def test_keys_of_8_bits_are_decoded_by_trtllm_where_that_was_measured_to_be_faster() -> None:
    for env, names in AUTO:
        first = ("fa,trtllm",) if env is H200 else ()
        assert auto.list_attention_names(env, "float8_e4m3fn") == (*first, *names)
        assert auto.list_attention_names(env, "bfloat16") == names


@pytest.mark.feature("S14")
def test_each_candidate_that_auto_passes_over_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = next(names_tried for served, names_tried in auto.ATTENTION if H200 in served)

    def make(name: str) -> str:
        if name != names[-1]:
            raise CannotRun(f"{name} lacks its kernels")
        return name

    with caplog.at_level(logging.DEBUG, "headstock"):
        assert select_first_accepted("auto", names, make, "attn (--attn)") == names[-1]
    messages = [record.getMessage() for record in caplog.records]
    expected = [
        f'event="auto rejected" setting="attn (--attn)" candidate={name} '
        f'reason="{name} lacks its kernels"'
        for name in names
    ]
    assert len(names) > 2 and messages == expected[:-1]


@pytest.mark.feature("S14")
@pytest.mark.parametrize(("env", "warnings"), [(H200, 1), (CPU, 0)])
def test_auto_says_so_when_a_gpu_is_left_with_sdpa(
    env: DeviceEnv, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = (Rejection(code="missing", message="its kernels are not installed"),)
    monkeypatch.setattr(
        requirements, "find_missing", lambda spec: () if spec.name == "sdpa" else lacking
    )
    (choice,) = select_attention("auto", env, question())
    assert choice.spec.name == "sdpa"
    select_attention("sdpa", env, question())  # as asked

    warning = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert len(warning) == warnings
    assert all("slowest backend" in line and "chosen=sdpa" in line for line in warning)
    assert all("headstock doctor, with the same flags" in line for line in warning)


DTYPES = [
    ("auto", "bfloat16", CPU, "float32"),
    ("auto", "float16", CPU, "float32"),
    ("auto", "float32", CPU, "float32"),
    ("auto", "bfloat16", H200, "bfloat16"),
    ("auto", "float16", H200, "float16"),
    ("auto", "float32", H200, "float16"),
    ("bfloat16", "float32", CPU, "bfloat16"),
]


@pytest.mark.feature("S23")
@pytest.mark.parametrize(("requested", "stored", "env", "expected"), DTYPES)
def test_the_dtype_table(requested: str, stored: str, env: DeviceEnv, expected: str) -> None:
    assert resolve_model_dtype(requested, attrs.evolve(model(), dtype=stored), env) == expected


@pytest.mark.feature("S14")
def test_operations_are_tried_from_the_fastest() -> None:
    assert auto.OPS == ("triton", "fbgemm", "onednn", "torch")


@pytest.mark.parametrize(("overlap", "expected"), [(None, False), (True, True), (False, False)])
def test_steps_overlap_on_a_cpu_where_that_is_asked_for(
    overlap: bool | None, expected: bool
) -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=8, max_seq_len=64, overlap=overlap))
    assert engine.limits.overlap is expected
    assert isinstance(engine.executor, ThreadedExecutor) is expected
    engine.close()
    assert auto.OVERLAP == {"cuda": True, "cpu": False}
