"""What is left of `trtllm` on machines of several kinds, the library present and absent."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from headstock import registry
from headstock.errors import CannotRun
from headstock.selection.capabilities import resolve_capabilities as resolved
from headstock.spi import (
    AttentionCapabilities,
    DeviceEnv,
    Feature,
    GraphSupport,
    IntSet,
    Phase,
    Planning,
    Rejection,
)
from headstock_conformance.attention import QUERY, query
from headstock_trtllm import toolchain
from headstock_trtllm.plugin import BFLOAT16, EIGHT_BIT_KV, FLOAT16, REQUIRE, resolve, spec

PRESENT = {"flashinfer-python": "0.6.18.post1"}
A100, H200, B200, B300, RTX = (
    DeviceEnv(device="cuda", capability=capability, distributions=PRESENT)
    for capability in ((8, 0), (9, 0), (10, 0), (10, 3), (12, 0))
)
PROMPTS, DECODE = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE})
HALF, EIGHT_BIT = {"q_dtype": "float16", "kv_dtype": "float16"}, {"kv_dtype": "float8_e4m3fn"}
SOME = (16, 32, 64)


@pytest.fixture(autouse=True)
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a compiler."""
    monkeypatch.setattr(toolchain, "_has_nvcc", lambda: True)


@pytest.mark.parametrize(
    ("env", "phases", "dtypes", "pages", "head_dims"),
    [
        (H200, frozenset(Phase), {BFLOAT16}, (*SOME, 128), (64, 128, 256)),
        (H200, PROMPTS, {BFLOAT16}, (*SOME, 128), (64, 128, 256)),
        (H200, DECODE, {BFLOAT16, FLOAT16, EIGHT_BIT_KV}, (*SOME, 128), (64, 128, 256)),
        (B200, frozenset(Phase), {BFLOAT16, FLOAT16}, SOME, (64, 128)),
        (B300, DECODE, {BFLOAT16, FLOAT16}, SOME, (64, 128)),
    ],
)
def test_what_is_claimed_by_device_and_phase(
    env: DeviceEnv,
    phases: frozenset[Phase],
    dtypes: set[Any],
    pages: tuple[int, ...],
    head_dims: tuple[int, ...],
) -> None:
    answer = resolved(spec(), query(phases=phases), env)
    assert answer.dtypes == dtypes
    assert answer.page_sizes == IntSet.of(*pages) and answer.head_dims == IntSet.of(*head_dims)
    assert answer.graph is GraphSupport.DECODE and answer.planning is Planning.NONE
    assert answer.paged and not answer.contiguous and answer.features == frozenset()


@pytest.mark.parametrize(
    ("env", "change", "words"),
    [
        (
            H200,
            HALF,
            r"prefill here: FMHA v2 adds the products of float16 in float16.*--attn\) to fi,trtllm",
        ),
        (
            H200,
            EIGHT_BIT,
            r"FMHA v2 reads float8_e4m3fn KV with queries of that type only.*--attn\) to fi,trtllm",
        ),
        (H200, EIGHT_BIT | {"phases": PROMPTS}, "FMHA v2 reads float8_e4m3fn KV"),
        (B200, EIGHT_BIT, "bfloat16 with float8_e4m3fn KV is not supported"),
        (
            H200,
            {"q_dtype": "float32", "kv_dtype": "float32"},
            "float32 with float32 KV is not supported",
        ),
        (H200, {"page_size": 256}, "page size 256 is not supported; supported: 16, 32, 64, 128"),
        (H200, {"page_size": 8}, "page size 8 is not supported; supported:"),
        (
            B200,
            {"page_size": 128},
            r"trtllm-gen reads pages of 16, 32, 64, not 128.*--page-size\) to 64",
        ),
        (B200, {"head_dim": 256}, "head_dim 256 is not supported; supported: 64, 128"),
        (H200, {"head_dim": 80}, "head_dim 80 is not supported; supported: 64, 128, 256"),
        (
            H200,
            {"heads": 64, "kv_heads": 1},
            "64 query heads per KV head are not supported; supported: any up to 32",
        ),
        (H200, {"contiguous": True}, "contiguous regions are not supported; supported: pages"),
        (H200, {"features": frozenset({Feature.SLIDING_WINDOW})}, "the model needs sliding-window"),
        (A100, {}, r"it runs on cuda sm_90, cuda sm_100 to sm_103, and this is cuda sm_80"),
        (RTX, {}, "this is cuda sm_120"),
        (DeviceEnv(device="cpu", distributions=PRESENT), {}, "this is cpu"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(
    env: DeviceEnv, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CannotRun, match=words):
        resolved(spec(), query(**change), env)


@pytest.mark.parametrize("env", [H200, B200])
@pytest.mark.parametrize("change", [HALF, EIGHT_BIT])
def test_decode_alone_takes_more_types_on_hopper(env: DeviceEnv, change: dict[str, Any]) -> None:
    asked = query(phases=DECODE, **change)
    if env is H200 or change is HALF:
        assert isinstance(resolved(spec(), asked, env), AttentionCapabilities)
    else:
        with pytest.raises(CannotRun, match="bfloat16 with float8_e4m3fn KV is not supported"):
            resolved(spec(), asked, env)


@pytest.mark.feature("S15")
def test_without_the_library_the_reason_says_what_to_install() -> None:
    answer = resolve(QUERY, evolve(H200, distributions={"torch": "2.11.0"}))
    hint = "pip install 'flashinfer-python>=0.6.18.post1,<0.8'"
    assert answer == (
        Rejection(code="missing", message="flashinfer-python is not installed", hint=hint),
    )
    assert isinstance(
        resolve(QUERY, evolve(H200, distributions={"flashinfer_python": "0.7.2"})),
        AttentionCapabilities,
    )
    absent = evolve(spec(), requires=(evolve(REQUIRE, import_name="no_such_module"),))
    with pytest.raises(
        CannotRun, match=r"trtllm.*flashinfer-python.* is not installed, install with: pip install"
    ):
        registry.require_installed(absent)


@pytest.mark.feature("S15")
def test_without_a_compiler_hopper_needs_what_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = {"flashinfer": ModuleSpec("flashinfer", None, is_package=True)}
    found["flashinfer"].submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(toolchain, "find_spec", found.get)
    with pytest.raises(CannotRun, match=r"no nvcc was found.*Install the CUDA toolkit"):
        resolved(spec(), query(), H200)
    assert resolved(spec(), query(), B200).dtypes  # whose kernels are published compiled

    (tmp_path / "data" / "aot" / "xqa_input_bf16").mkdir(parents=True)
    assert resolved(spec(), query(), H200).dtypes

    monkeypatch.setattr(toolchain, "find_spec", {}.get)
    assert isinstance(resolve(query(), H200), tuple)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert resolved(spec(), query(), H200).dtypes


def test_the_spec_claims_what_either_family_can_do() -> None:
    claims = spec().capabilities
    assert claims.phases == set(Phase) and claims.dtypes == {BFLOAT16, FLOAT16, EIGHT_BIT_KV}
    assert 7 in claims.gqa_ratios and 33 not in claims.gqa_ratios
