"""What `headstock tune` kept: who takes it, and what ends its use."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headstock import LLM, EngineConfig
from headstock.llm import get_session
from headstock.selection.auto_choices import FastestChoices, move_to_front
from headstock.startup.device import describe_device
from headstock.startup.summary import EngineSummary
from headstock.startup.tuned_choices import (
    TunedCandidate,
    TunedChoices,
    load_tuned_choices,
    read_subject,
    read_tuned_choices,
    write_tuned_choices,
)


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    """A configuration of the demo model that looks for choices in the folder."""
    return EngineConfig(tuned_choices=str(folder), num_pages=16, **settings)


def keep_choices(folder: Path, ops: str = "torch", **changes: Any) -> Path:
    """Keep choices for the demo model, here, by which these ops are the fastest."""
    config = make_config(folder)
    choices = TunedChoices(
        subject=read_subject(config, describe_device("cpu")),
        date="2026-11-23",
        steps=("decode 1", "decode 8"),
        candidates=(
            TunedCandidate(attn="sdpa", ops="fbgemm", milliseconds=(2.0, None)),
            TunedCandidate(attn="sdpa", ops="torch", milliseconds=(1.0, None)),
            TunedCandidate(attn="fa", ops="auto", refusal="no GPU"),
        ),
        fastest=FastestChoices(attn="sdpa", ops=ops),
    )
    path = write_tuned_choices(str(folder), choices)
    assert read_tuned_choices(path) == choices
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def start_engine(config: EngineConfig) -> EngineSummary:
    """The summary of an engine of this configuration."""
    with LLM(config=config) as llm:
        return get_session(llm).engine.summary


def test_auto_takes_what_was_measured_and_says_so(tmp_path: Path) -> None:
    before = start_engine(make_config(tmp_path))
    keep_choices(tmp_path)
    after = start_engine(make_config(tmp_path))

    assert before.ops != "torch" and not any("tune" in note for note in before.notes)
    assert after.ops == "torch"
    (note,) = (note for note in after.notes if "tune" in note)
    assert 'ops="torch"' in note and "2026-11-23" in note


def test_a_named_choice_and_off_leave_it_alone(tmp_path: Path) -> None:
    keep_choices(tmp_path)

    assert start_engine(make_config(tmp_path, ops="onednn")).ops == "onednn"
    assert start_engine(EngineConfig(tuned_choices=None, num_pages=16)).ops != "torch"


def test_figures_of_another_type_do_not_count(tmp_path: Path) -> None:
    keep_choices(tmp_path)

    for settings in ({"dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}):
        choices, reason = load_tuned_choices(
            make_config(tmp_path, **settings), describe_device("cpu")
        )
        assert choices is None and "has no choices for this model" in reason


@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_other_software_ends_its_use_and_is_named(name: str, tmp_path: Path) -> None:
    path = keep_choices(tmp_path)
    content = json.loads(path.read_text())
    content["subject"]["software"][name] = "1.0"
    path.unlink()
    (tmp_path / "older.json").write_text(json.dumps(content))

    summary = start_engine(make_config(tmp_path))

    assert summary.ops != "torch"
    (note,) = (note for note in summary.notes if "tune" in note)
    assert f"another version of {name}:" in note
    choices, reason = load_tuned_choices(make_config(tmp_path), describe_device("cpu"))
    assert choices is None and reason == note


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "x": 2}'])
def test_a_damaged_file_is_a_line_in_the_log(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_choices(tmp_path).write_text(content)
    with caplog.at_level(logging.WARNING, "headstock"):
        summary = start_engine(make_config(tmp_path))

    assert summary.ops != "torch"
    assert any("tuned choices are not read" in each.getMessage() for each in caplog.records)


def test_a_file_of_another_format_is_left_alone(tmp_path: Path) -> None:
    keep_choices(tmp_path, format=99)

    assert start_engine(make_config(tmp_path)).ops != "torch"


def test_what_cannot_run_is_passed_over(tmp_path: Path) -> None:
    keep_choices(tmp_path, ops="triton")

    assert (
        start_engine(make_config(tmp_path)).ops
        == start_engine(EngineConfig(tuned_choices=None, num_pages=16)).ops
    )


def test_the_front_takes_names_of_the_list_alone() -> None:
    assert move_to_front(("a", "b", "c"), "c") == ("c", "a", "b")
    assert move_to_front(("a", "b"), "other") == move_to_front(("a", "b"), None) == ("a", "b")
