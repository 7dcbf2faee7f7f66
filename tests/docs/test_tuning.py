"""docs/tuning.md recommends settings that can be typed, and names steps as timelines show them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from source_tree import ROOT

from headstock.cli.main import main
from headstock.execution.executor import LocalExecutor
from headstock.execution.step import StepMaker
from headstock.scheduler import Plan
from headstock_bench.workloads import WORKLOADS

PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
KINDS = ("offline batch", "one stream", "shared prefixes", "long prompts", "little memory")


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, by row."""
    section = re.split(r"^#+ ", PAGE.split(f"\n### {heading}\n")[1], flags=re.MULTILINE)[0]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line.startswith("| ")
    ]


RECOMMENDED = [row for heading in ("On a GPU", "On a CPU") for row in rows(heading)[2:]]


@pytest.mark.feature("S8")
@pytest.mark.parametrize("heading", ["On a GPU", "On a CPU"])
def test_each_kind_of_workload_has_a_row(heading: str) -> None:
    found = [row[0].split(",")[0] for row in rows(heading)[2:]]
    assert found == list(KINDS)


@pytest.mark.feature("S8")
@pytest.mark.parametrize(
    "span", sorted({s for row in RECOMMENDED for s in re.findall(r"`(--[^`]+)`", row[1])})
)
def test_what_is_recommended_is_a_setting(span: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = span.split()
    given = [*words, "1"] if len(words) == 1 and not words[0].startswith("--no-") else words
    assert main(["config", "show", *given]) == 0, capsys.readouterr().err


@pytest.mark.feature("S8")
def test_what_is_to_be_measured_is_a_workload() -> None:
    named = [row[3].strip("`").split()[0] for row in RECOMMENDED if row[3]]
    assert named
    assert [name for name in named if name not in WORKLOADS] == []


@pytest.mark.feature("S26")
def test_the_name_of_a_step_is_the_one_that_timelines_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", names.append)
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    nothing: Any = None
    steps = StepMaker(buffers=on_cuda, sampling=nothing, pooling=nothing, router=nothing)
    executor = LocalExecutor(steps=steps, runner=nothing)
    seats, ones = np.arange(256, dtype=np.int32), np.ones(256, np.int32)
    told = {
        "rows": seats,
        "admission_ids": seats,
        "starts": seats,
        "stops": seats + 1,
        "num_logits": ones,
        "samples": ones,
    }
    executor._nvtx_range(Plan(number=412, num_decode=256, **told))
    executor._nvtx_range(Plan(number=413, num_decode=250, **told))
    (shown,) = re.findall(r"such as `(step [^`]+)`", PAGE)
    (included,) = re.findall(r'--nvtx-include "regex:([^"]+)/"', PAGE)

    assert names == [shown, "step 413: 250 decode, 6 prefill"]
    assert [re.fullmatch(included, name) is not None for name in names] == [True, False]
