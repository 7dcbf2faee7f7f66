"""The checks of attention backends over interpreted kernels, which `headstock plugins check` makes
on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from headstock import registry
from headstock.spi import AttentionSpec, DeviceEnv
from headstock_conformance.attention.checks import list_cases
from headstock_conformance.case import Case
from headstock_triton_attn import backend as module

H200 = DeviceEnv(device="cuda", capability=(9, 0))
SLOW = ("calls", "long rows", "prefill: many rows", "extend: many rows")
"""Words of cases that take minutes interpreted, without other kinds of launches."""
FEW = ("decode: bfloat16 with float8", "decode: two engines")
"""Words of cases of every run of the tests."""


def list_kit() -> list[object]:
    """The cases of the kit as parameters; most are `full`."""
    spec: AttentionSpec = registry.load_spec("attention", "triton")
    cases = [
        case
        for case in list_cases(spec, H200, "cpu")
        if not any(words in case.name for words in SLOW)
    ]
    assert len(cases) > 80
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[] if case.name.startswith(FEW) else [pytest.mark.full],
        )
        for case in cases
    ]


@pytest.mark.parametrize("case", list_kit())
def test_it_passes_the_checks_of_attention_backends(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "count_processors", lambda device: 132)
    torch.manual_seed(0)
    case.run()
