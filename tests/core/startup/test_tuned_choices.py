"""What `headstock tune` kept: who takes it, and what ends its use."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from broken_plugins import Dist, write_installed
from often import often

from headstock import LLM, EngineConfig, HeadstockError, ModelError, PluginBroken, UsageError
from headstock.llm import get_session
from headstock.selection.auto_choices import FastestChoices, move_to_front
from headstock.startup.device import describe_device
from headstock.startup.model_loading import locate_model, read_family
from headstock.startup.operation_tuning import tune_operations
from headstock.startup.summary import EngineSummary
from headstock.startup.tuned_choices import (
    TunedCandidate,
    TunedChoices,
    create_choices_folder,
    load_tuned_choices,
    read_tuned_choices,
    write_tuned_choices,
)
from headstock.startup.tuning_subject import read_subject


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


@pytest.mark.feature("V2")
def test_auto_takes_what_was_measured_and_says_so(tmp_path: Path) -> None:
    before = start_engine(make_config(tmp_path))
    keep_choices(tmp_path)
    after = start_engine(make_config(tmp_path))

    assert before.ops != "torch" and not any("tune" in note for note in before.notes)
    assert after.ops == "torch"
    (note,) = (note for note in after.notes if "tune" in note)
    assert "ops (--ops) torch" in note and "2026-11-23" in note


@pytest.mark.feature("V2")
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


@pytest.mark.feature("V2")
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


@pytest.mark.parametrize(
    "content", often(3, ["", "[]", '{"format": 1, "x": 2}', "{}", '{"format": 1}'])
)
def test_a_damaged_file_is_a_line_in_the_log(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_choices(tmp_path).write_text(content)
    with caplog.at_level(logging.WARNING, "headstock"):
        summary = start_engine(make_config(tmp_path))

    assert summary.ops != "torch"
    lines = [each.getMessage() for each in caplog.records]
    said = [line for line in lines if "tuned choices are not read" in line]
    assert len(said) == 1 and "run 'headstock tune' again" in said[0]
    assert "Error" not in said[0]
    choices, reason = load_tuned_choices(make_config(tmp_path), describe_device("cpu"))
    assert choices is None and "cannot be read; run 'headstock tune' again" in reason


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"tuned_choices": "~nobody-here/x"}, UsageError, "expected .* got ~nobody-here/x"),
        ({"model": "~nobody-here/x"}, HeadstockError, "~nobody-here/x"),
        ({"chat_template": "~nobody-here/x.jinja"}, ModelError, "cannot be read: No such file"),
    ],
)
def test_a_home_that_there_is_not_is_an_error_of_the_users(
    settings: dict[str, Any], error: type[HeadstockError], says: str
) -> None:
    with pytest.raises(error, match=says):
        LLM(num_pages=16, **settings)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "choices"
    path.write_text("")
    for use in (
        lambda: start_engine(make_config(path)),
        lambda: load_tuned_choices(make_config(path), describe_device("cpu")),
        lambda: create_choices_folder(str(path)),
    ):
        with pytest.raises(UsageError, match=r"expected a directory or off, got .*choices$"):
            use()
    with pytest.raises(ModelError, match="cannot be written: Not a directory; pass a directory"):
        create_choices_folder(str(path / "below"))
    assert create_choices_folder(str(tmp_path / "new" / "folder")).is_dir()


def test_a_file_of_another_format_is_left_alone(tmp_path: Path) -> None:
    keep_choices(tmp_path, format=99)

    assert start_engine(make_config(tmp_path)).ops != "torch"


@pytest.mark.feature("V2")
def test_what_cannot_run_is_passed_over(tmp_path: Path) -> None:
    keep_choices(tmp_path, ops="triton")

    assert (
        start_engine(make_config(tmp_path)).ops
        == start_engine(EngineConfig(tuned_choices=None, num_pages=16)).ops
    )


def test_the_front_takes_names_of_the_list_alone() -> None:
    assert move_to_front(("a", "b", "c"), "c") == ("c", "a", "b")
    assert move_to_front(("a", "b"), "other") == move_to_front(("a", "b"), None) == ("a", "b")


# options that operations measured of themselves

SPEEDY = """
import attrs
from headstock.builtin.specs import torch_ops
from headstock.ops.torch_ops import TorchOps

@attrs.frozen(kw_only=True)
class Options:
    width: int = 1
    depth: int = 1

class Speedy(TorchOps):
    def __init__(self, options):
        self.options = options

    def configure(self, query, env):
        print("options", self.options.width, self.options.depth)

    def tune(self, query, env):
        return {found}

def spec():
    return attrs.evolve(
        torch_ops(), name="speedy", implementation="speedy:Speedy", options="speedy:Options"
    )
"""


@pytest.fixture
def install_speedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], EngineConfig]:
    """Installs operations that find `found`; gives a configuration that names them."""

    def install(found: str) -> EngineConfig:
        text = SPEEDY.replace("{found}", found)
        folder = tmp_path / "site"
        folder.mkdir()
        write_installed(folder, (Dist(name="speedy", plugin="speedy", module=text, kind="ops"),))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "speedy", raising=False)
        return make_config(tmp_path / "kept", ops="speedy")

    return install


def keep_options(config: EngineConfig, *options: str) -> None:
    """Keep choices by which these options of `speedy` are the fastest."""
    choices = TunedChoices(
        subject=read_subject(config, describe_device("cpu")),
        date="2026-11-26",
        steps=("decode 1",),
        candidates=(
            TunedCandidate(attn="sdpa", ops="speedy", milliseconds=(1.0,), options=options),
        ),
        fastest=FastestChoices(attn="sdpa", ops="speedy", options=options),
    )
    assert config.tuned_choices is not None
    path = write_tuned_choices(config.tuned_choices, choices)
    assert read_tuned_choices(path) == choices


@pytest.mark.feature("V3")
def test_operations_measure_their_own_options(
    install_speedy: Callable[[str], EngineConfig],
) -> None:
    config = install_speedy("{'width': str(query.model.hidden), 'depth': '3'}")
    hidden = read_family(locate_model(config.model), config.model_family, ()).config.hidden

    found = tune_operations(config, describe_device("cpu"))

    assert found == (f"speedy.width={hidden}", "speedy.depth=3")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("{}['lost']", "its tune raised KeyError: 'lost'"),
        ("7", "tune: expected texts by option, got 7"),
        ("{'width': 2}", "tune: expected texts by option, got {'width': 2}"),
        ("{'height': '2'}", "its tune found options that it refuses: .*no such option"),
        ("{'width': 'wide'}", "its tune found options that it refuses: .*expected an integer"),
    ],
)
def test_what_operations_find_wrongly_is_theirs(
    install_speedy: Callable[[str], EngineConfig], found: str, says: str
) -> None:
    with pytest.raises(PluginBroken, match=rf"ops \(--ops\) speedy: {says}"):
        tune_operations(install_speedy(found), describe_device("cpu"))


def test_operations_that_measure_nothing_keep_their_options() -> None:
    assert tune_operations(EngineConfig(ops="torch", num_pages=16), describe_device("cpu")) == ()


@pytest.mark.feature("V3")
def test_operations_take_the_options_that_were_measured_but_what_the_user_gives(
    install_speedy: Callable[[str], EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = install_speedy("{}")
    start_engine(config)
    keep_options(config, "speedy.width=5", "speedy.depth=6")
    summary = start_engine(config)
    start_engine(evolve(config, opt=("speedy.width=9",)))
    start_engine(evolve(config, tuned_choices=None))

    assert capsys.readouterr().out.splitlines() == [
        "options 1 1",
        "options 5 6",
        "options 9 6",
        "options 1 1",
    ]
    (note,) = (note for note in summary.notes if "tune" in note)
    assert "speedy.width, speedy.depth" in note and "2026-11-26" in note


def test_other_operations_leave_the_options_alone(
    install_speedy: Callable[[str], EngineConfig],
) -> None:
    config = install_speedy("{}")
    keep_options(config, "speedy.width=5")

    summary = start_engine(evolve(config, ops="torch"))

    assert summary.ops == "torch" and not any("speedy" in note for note in summary.notes)


def test_a_kept_option_that_is_no_more_is_refused_by_what_kept_it(
    install_speedy: Callable[[str], EngineConfig],
) -> None:
    config = install_speedy("{}")
    keep_options(config, "speedy.height=5")

    with pytest.raises(UsageError, match=r"no such option.*'headstock tune' kept it: run it again"):
        start_engine(config)
