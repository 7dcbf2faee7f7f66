"""What is left of `fi` on machines of several kinds, the library present and absent."""

from __future__ import annotations

import pytest
from attrs import evolve

from headstock import registry
from headstock.cli.main import main
from headstock.errors import CannotRun, UsageError
from headstock.selection.capabilities import resolve_capabilities as resolved
from headstock.spi import (
    AttentionCapabilities,
    DeviceEnv,
    Feature,
    GraphSupport,
    Phase,
    Planning,
    Rejection,
)
from headstock_conformance.attention import QUERY, query
from headstock_fi.options import FlashInferOptions
from headstock_fi.plugin import REQUIRE, resolve, spec

PRESENT = {"flashinfer-python": "0.6.18.post1"}


def env(major: int, minor: int, **distributions: str) -> DeviceEnv:
    return DeviceEnv(
        device="cuda", capability=(major, minor), distributions=distributions or PRESENT
    )


@pytest.mark.parametrize(
    ("capability", "eight_bit"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_8_bit_kv_needs_a_gpu_that_converts_it(
    capability: tuple[int, int], eight_bit: bool
) -> None:
    answer = resolve(QUERY, env(*capability))
    assert isinstance(answer, AttentionCapabilities)
    assert (("bfloat16", "float8_e4m3fn", "bfloat16") in answer.dtypes) == eight_bit
    narrow = query(kv_dtype="float8_e4m3fn")
    if eight_bit:
        assert resolved(spec(), narrow, env(*capability)) == answer
    else:
        with pytest.raises(CannotRun, match="bfloat16 with float8_e4m3fn KV is not supported"):
            resolved(spec(), narrow, env(*capability))


@pytest.mark.feature("S15")
def test_without_the_library_or_a_gpu_the_reason_says_so() -> None:
    answer = resolve(QUERY, env(9, 0, torch="2.11.0"))
    assert isinstance(answer, tuple)
    assert answer == (
        Rejection(
            code="missing",
            message="flashinfer-python is not installed",
            hint="pip install 'flashinfer-python>=0.6.18.post1,<0.8'",
        ),
    )
    assert isinstance(resolve(QUERY, env(9, 0, flashinfer_python="0.7.2")), AttentionCapabilities)
    with pytest.raises(CannotRun, match="it runs on cuda from sm_80, and this is cuda sm_75"):
        resolved(spec(), QUERY, env(7, 5))
    absent = evolve(spec(), requires=(evolve(REQUIRE, import_name="no_such_module"),))
    with pytest.raises(
        CannotRun, match=r"fi.*flashinfer-python.* is not installed, install with: pip install"
    ):
        registry.require_installed(absent)


@pytest.mark.feature("S15")
@pytest.mark.parametrize("name", ["fi", "trtllm"])
def test_without_a_gpu_nobody_is_told_to_install_a_library_that_would_not_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--device", "cpu", "--attn", name, "--prompt", "Hello", "--quiet"]) == 5
    error = capsys.readouterr().err
    assert "and this is cpu. Set attn (--attn) to sdpa." in error and "pip install" not in error


def test_shapes_and_features_without_kernels_are_refused() -> None:
    for change, words in (
        ({"head_dim": 80}, "head_dim 80 is not supported; supported: 64, 128, 256"),
        ({"features": frozenset({Feature.SOFTCAP})}, "the model needs softcap"),
        ({"q_dtype": "float32"}, "float32 with bfloat16 KV is not supported"),
    ):
        with pytest.raises(CannotRun, match=words):
            resolved(spec(), query(**change), env(9, 0))


def test_the_spec_says_that_it_plans() -> None:
    claims = spec().capabilities
    assert claims.planning is Planning.PER_STEP and claims.graph is GraphSupport.DECODE
    assert claims.phases == set(Phase)


def test_options_come_from_the_command_line() -> None:
    made = registry.make_options(spec(), ["fi.prefill=fa3", "fi.tensor-cores=off"])
    assert made == FlashInferOptions(prefill="fa3", tensor_cores="off")
    for wrong in ("fi.prefill=fa4", "fi.workspace_mb=1", "fi.splits=2"):
        with pytest.raises(UsageError, match=r"opt \(--opt\) fi"):
            registry.make_options(spec(), [wrong])
