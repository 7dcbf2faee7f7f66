"""Whether a backend can serve: by what it declares, and by what its own resolve says."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest

from headstock.engine import auto
from headstock.engine.negotiate import model_dtype, pool_dtype
from headstock.engine.resolve import AttentionQuestion, check_narrower, rejections, resolve
from headstock.engine.selection import attention_for, first
from headstock.errors import CannotRun, PluginBroken
from headstock.registry import requirements
from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    DeviceEnv,
    DeviceRange,
    Feature,
    GraphSupport,
    IntSet,
    Phase,
    Planning,
    Rejection,
    SpiRange,
)

from .test_memory import model

CPU = DeviceEnv(device="cpu")
H200 = DeviceEnv(device="cuda", capability=(9, 0))
ALL = frozenset(Phase)


def capabilities(**changes: Any) -> AttentionCapabilities:
    """A backend for everything on a CPU."""
    base: dict[str, Any] = {
        "phases": ALL, "devices": (DeviceRange("cpu"),), "dtypes": frozenset({("float32", "float32", "float32")}),
        "head_dims": IntSet.all(), "gqa_ratios": IntSet.all(), "page_sizes": IntSet.of(16, 32), "paged": True,
        "contiguous": False, "graph": GraphSupport.NEVER, "planning": Planning.NONE, "features": frozenset(),
    }  # fmt: skip
    return AttentionCapabilities(**(base | changes))


def spec(**changes: Any) -> AttentionSpec:
    """Its spec."""
    return AttentionSpec(
        name="x", spi=SpiRange(0, 1), summary="", implementation="a:b", capabilities=capabilities(**changes)
    )


def question(**changes: Any) -> AttentionQuestion:
    """What a 7B decoder asks in float32 with pages of 16."""
    base = AttentionQuestion(
        model=model(), dtype="float32", kv_dtype="float32", page_size=16, contiguous=False, max_rows=8, max_seq_len=64
    )
    return attrs.evolve(base, **changes)


REFUSED = [
    ({"phases": frozenset({Phase.DECODE})}, {}, "phase"),
    ({"devices": (DeviceRange("cuda", (9, 0)),)}, {}, "device"),
    ({"head_dims": IntSet.of(64)}, {}, "head_dim"),
    ({"gqa_ratios": IntSet.of(2)}, {}, "gqa_ratio"),
    ({}, {"page_size": 8}, "page_size"),
    ({}, {"kv_dtype": "float8_e4m3fn"}, "dtype"),
    ({}, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}, "dtype"),
    ({}, {"contiguous": True}, "contiguous"),
    ({"paged": False, "contiguous": True}, {}, "paged"),
]


@pytest.mark.parametrize(("claims", "asked", "code"), REFUSED)
def test_each_claim_that_is_not_met_is_a_reason(claims: dict[str, Any], asked: dict[str, Any], code: str) -> None:
    query = question(**asked).query(ALL)

    (reason,) = rejections(capabilities(**claims), query, CPU)
    assert reason.code == code and reason.hint
    with pytest.raises(CannotRun, match=r"--attn x cannot serve decode/extend/prefill here"):
        resolve(spec(**claims), query, CPU)


def test_T8_T9_P1_paged_and_contiguous_are_capabilities_and_the_other_is_an_error() -> None:
    paged, region = spec(), spec(paged=False, contiguous=True)

    assert resolve(paged, question().query(ALL), CPU)
    assert resolve(region, question(contiguous=True).query(ALL), CPU)
    with pytest.raises(CannotRun, match=r"pages only.*--paged-attn on"):
        resolve(paged, question(contiguous=True).query(ALL), CPU)
    with pytest.raises(CannotRun, match=r"contiguous regions only.*--paged-attn off"):
        resolve(region, question().query(ALL), CPU)


def test_P6_S3_S4_a_page_size_that_is_not_served_lists_those_that_are() -> None:
    with pytest.raises(CannotRun, match="pages of 8 are not among 16, 32"):
        resolve(spec(), question(page_size=8).query(ALL), CPU)


def test_a_feature_that_is_not_named_cannot_be_done() -> None:
    windowed = attrs.evolve(model(), layers=(attrs.evolve(model().layers[0], window=5),))

    query = question(model=windowed).query(ALL)

    assert query.features == {Feature.SLIDING_WINDOW}
    assert [reason.code for reason in rejections(capabilities(), query, CPU)] == ["feature"]


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(CannotRun) as caught:
        resolve(spec(head_dims=IntSet.of(64), gqa_ratios=IntSet.of(2)), question(page_size=8).query(ALL), CPU)

    assert all(word in str(caught.value) for word in ("heads of 128", "1 query heads", "pages of 8"))


@pytest.mark.parametrize(
    "wider",
    [{"phases": ALL}, {"contiguous": True}, {"graph": GraphSupport.ALWAYS}, {"features": frozenset({Feature.LSE})},
     {"page_sizes": IntSet.of(64)}, {"head_dims": IntSet.all()}, {"gqa_ratios": IntSet.multiples(3, most=9)}],
)  # fmt: skip
def test_resolve_may_only_narrow(wider: dict[str, Any]) -> None:
    served = {"page_sizes": IntSet.multiples(128), "head_dims": IntSet.of(64, 128), "gqa_ratios": IntSet.of(1, 2, 4)}
    declared = spec(phases=frozenset({Phase.DECODE}), **served)
    narrower = {"phases": frozenset(), "page_sizes": IntSet.of(256), "head_dims": IntSet.of(64)}

    check_narrower(declared, capabilities(**served | narrower))
    with pytest.raises(PluginBroken, match="claims more"):
        check_narrower(declared, capabilities(**served | narrower | wider))


AUTO = [
    (CPU, ("sdpa",)),
    (H200, ("fa,fi", "fa", "fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(10, 0)), ("trtllm", "fi", "fa,fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(8, 0)), ("fa,fi", "fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(8, 9)), ("fa,fi", "fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(11, 0)), ("fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(12, 0)), ("fi", "sdpa")),
    (DeviceEnv(device="cuda", capability=(7, 5)), ("sdpa",)),
]


@pytest.mark.parametrize(("env", "names"), AUTO)
def test_S14_what_auto_tries_on_each_device(env: DeviceEnv, names: tuple[str, ...]) -> None:
    assert next(found for served, found in auto.ATTENTION if env in served) == names


def test_S14_each_candidate_that_auto_passes_over_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    names = next(found for served, found in auto.ATTENTION if H200 in served)

    def make(name: str) -> str:
        if name != names[-1]:
            raise CannotRun(f"{name} lacks its kernels")
        return name

    with caplog.at_level(logging.DEBUG, "headstock"):
        assert first("auto", names, make, "--attn") == names[-1]
    told = [record.getMessage() for record in caplog.records]
    wanted = [f'event="auto rejected" flag=--attn candidate={name} reason="{name} lacks its kernels"' for name in names]
    assert len(names) > 2 and told == wanted[:-1]


@pytest.mark.parametrize(("env", "warnings"), [(H200, 1), (CPU, 0)])
def test_S14_auto_says_so_when_a_gpu_is_left_with_sdpa(
    env: DeviceEnv, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = (Rejection(code="missing", message="its kernels are not installed"),)
    monkeypatch.setattr(requirements, "missing", lambda spec: () if spec.name == "sdpa" else lacking)
    (choice,) = attention_for("auto", env, question())
    assert choice.spec.name == "sdpa"
    attention_for("sdpa", env, question())  # as asked

    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == warnings
    assert all("left with its last choice" in line and "chosen=sdpa" in line for line in said)
    assert all("headstock plugins list attention" in line for line in said)


DTYPES = [
    ("auto", "bfloat16", CPU, "float32"),
    ("auto", "float16", CPU, "float32"),
    ("auto", "float32", CPU, "float32"),
    ("auto", "bfloat16", H200, "bfloat16"),
    ("auto", "float16", H200, "float16"),
    ("auto", "float32", H200, "float16"),
    ("bfloat16", "float32", CPU, "bfloat16"),
]


@pytest.mark.parametrize(("asked", "stored", "env", "wanted"), DTYPES)
def test_S23_the_dtype_table(asked: str, stored: str, env: DeviceEnv, wanted: str) -> None:
    assert model_dtype(asked, attrs.evolve(model(), dtype=stored), env) == wanted


def test_P7_fp8_halves_bytes_per_token() -> None:
    import torch

    from headstock.engine.memory import page_bytes

    half, full = (getattr(torch, pool_dtype(name, "bfloat16")) for name in ("fp8_e4m3", "auto"))

    assert 2 * page_bytes(model(), 16, half) == page_bytes(model(), 16, full)
