"""Every shipped plugin passes its check; kernel backends over stand-ins for their libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends.flash_attn import fakes as flash_attn
from backends.flashinfer import fakes as flashinfer
from backends.trtllm import fakes as trtllm

from headstock import registry
from headstock.errors import CannotRun
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    DeviceEnv,
    LayoutKind,
)
from headstock_conformance import CheckReport, Outcome, check_plugin
from headstock_conformance.attention.checks import list_cases
from headstock_conformance.case import run_cases
from headstock_conformance.check import CHECKED_KINDS
from headstock_fa import kernels
from headstock_fa.backend import FlashAttentionBackend
from headstock_fa.providers import PROVIDERS, choose_provider
from headstock_fi.backend import FlashInferBackend
from headstock_trtllm.backend import TrtllmBackend
from headstock_trtllm.kernels import Hopper

SHIPPED = [
    (kind, plugin.name)
    for kind in CHECKED_KINDS
    for plugin in registry.list_installed(kind)
    if plugin.distribution.startswith("headstock")
]
NEEDS_GPU = {"fa", "fi", "trtllm", "triton", "cudagraph"}
"""Plugins that run on CUDA alone."""


@pytest.mark.feature("R7")
@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), SHIPPED, ids=[":".join(each) for each in SHIPPED])
def test_every_shipped_plugin_passes_on_the_cpu(kind: str, name: str) -> None:
    if name in NEEDS_GPU:
        with pytest.raises(CannotRun, match="it runs on cuda"):
            check_plugin(kind, name, "cpu")
        return
    assert_passed(check_plugin(kind, name, "cpu"))


def assert_passed(report: CheckReport, fewest: int = 1) -> None:
    """No case failed, and some passed."""
    failed = {each.case: each.reason for each in report.results if each.outcome is Outcome.FAILED}
    assert not failed, failed
    assert report.count(Outcome.PASSED) >= fewest


def make_env(**distributions: str) -> DeviceEnv:
    """An H200 with these libraries."""
    return DeviceEnv(device="cuda", capability=(9, 0), distributions=distributions)


def check_with(
    name: str, env: DeviceEnv, make: Callable[[AttentionContext], AttentionBackend]
) -> CheckReport:
    """The check of a backend for that machine, over tensors of the CPU."""
    spec: AttentionSpec = registry.load_spec("attention", name)
    # Latent vectors are read by other kernels, with stand-ins and tests of their own.
    cases = [
        case
        for case in list_cases(spec, env, "cpu", lambda spec, context: make(context))
        if not case.name.startswith(LayoutKind.LATENT.value)
    ]
    return CheckReport(kind="attention", name=name, device="cpu", results=run_cases(cases))


@pytest.fixture
def vllm_operators() -> Iterator[tuple[object, object]]:
    with flash_attn.vllm_operators() as operators:
        yield operators


@pytest.mark.full
@pytest.mark.parametrize(
    "distributions",
    [{"flash_attn_3": "3.0.1"}, {"vllm": "0.24.0"}, {"flash_attn": "2.8.3"}, {"torch": "2.13.0"}],
    ids=["flash_attn_3", "vllm", "flash_attn", "torch"],
)
def test_fa_passes_over_a_stand_in_for_each_provider(
    distributions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    vllm_operators: tuple[object, object],
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn.interface())
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn.flash_attn())
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn_out", flash_attn.varlen_attn_out, raising=False
    )
    monkeypatch.setattr(kernels, "load_vllm", lambda: kernels.VllmKernel(*vllm_operators))
    env = make_env(**distributions)
    provider, _ = choose_provider(env)
    assert provider in PROVIDERS
    report = check_with("fa", env, lambda context: FlashAttentionBackend(context, provider))
    assert_passed(report, 15)


@pytest.mark.full
def test_fi_passes_over_a_stand_in_for_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = flashinfer.flashinfer("0.6.18")
    decode = SimpleNamespace(fast_decode_plan=flashinfer.fast_decode_plan)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    env = make_env(**{"flashinfer-python": "0.6.18.post1"})
    assert_passed(check_with("fi", env, FlashInferBackend), 15)


@pytest.mark.full
def test_trtllm_passes_over_a_stand_in_for_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, functions in trtllm.FUNCTIONS.items():
        module = SimpleNamespace(**{each.__name__: each for each in functions})
        monkeypatch.setitem(sys.modules, name, module)
    env = make_env(**{"flashinfer-python": "0.6.18.post1"})
    report = check_with(
        "trtllm", env, lambda context: TrtllmBackend(context, Hopper(torch.device("cpu")))
    )
    assert_passed(report, 15)
