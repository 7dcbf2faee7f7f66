"""The header of a recording from anywhere is read, or refused in one line."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from core.record.runs import make_requests, make_run_header, make_run_limits, record_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import count_examples, often

from headstock.cli.main import main
from headstock.record.file import FIRST, HEADER, read_frame, write_frame
from headstock.record.header_rules import GROUP_RULES, LARGEST, LIMIT_RULES
from headstock.scheduler import Limits
from headstock.spi import KVGroup

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A short recording."""
    path = tmp_path_factory.mktemp("recording") / "it"
    record_run(path, make_run_limits(), make_requests(8), 60)
    return path.read_bytes()


def change_header(data: bytes, edit: Any) -> bytes:
    """The recording with `edit` applied to its header, checksums true."""
    file = io.BytesIO(data)
    line = file.readline()
    _, plain = read_frame(file, "it", 0)
    values = json.loads(plain)
    edit(values)
    changed = io.BytesIO()
    changed.write(line)
    write_frame(changed, HEADER, json.dumps(values).encode())
    return changed.getvalue() + file.read()


def list_places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where values lie within a value of JSON."""
    if at:
        yield at
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from list_places(inner, (*at, key))


def put_value(values: Any, at: Place, new: Any) -> None:
    """Replace the value at a place."""
    for key in at[:-1]:
        values = values[key]
    values[at[-1]] = new


FIELDS = [
    at
    for at in list_places(
        json.loads(json.dumps({**make_run_header(make_run_limits()), "first": 0}))
    )
    if at[0] != "fields"
]


@pytest.mark.parametrize("at", FIELDS, ids=str)
@pytest.mark.parametrize(
    "new",
    often(6, [{}, "\ud800", -1, True, LARGEST + 1, None, [[]], 1.5, 1 << 40]),
    ids=repr,
)
def test_a_field_of_a_wrong_type_or_an_absurd_size_is_refused_in_one_line(
    at: Place, new: Any, recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the field may be so, in which case the replay tells its end."""
    file = tmp_path / "it"
    file.write_bytes(change_header(recording, lambda values: put_value(values, at, new)))
    code = main(["replay", str(file)])
    out, err = capsys.readouterr()
    assert "internal error" not in err and out.count("\n") + err.count("\n") == 1
    fits = [
        isinstance(new, str) and at[0] in ("scheduler", "cache", "model", "headstock"),
        isinstance(new, str) and at == ("limits", "scheduler"),
        new is None and at in (("cache",), ("prefix_cache_n",), ("groups", 0, "window")),
        new is True and at[-1] in ("recompute", "overlap", "check"),
        (new == 1 << 40 and at == ("first",)) or (new == LARGEST + 1 and at == ("first",)),
    ]
    assert code == 6 or any(fits), (code, out, err)
    if code == 6 and new is not None:
        assert "header is not as this version writes it" in err


@settings(
    max_examples=count_examples(110), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_header_ends_in_a_traceback(
    data: st.DataObject, recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = st.integers(-2, 200) | st.integers(-(2**70), 2**70) | st.floats()
    leaves = (
        st.none()
        | st.booleans()
        | numbers
        | st.text(max_size=5)
        | st.sampled_from(["radix", "naive", "mixed"])
    )
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    )

    def edit(found: Any) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            here = [at for at in list_places(copy.deepcopy(found)) if at[0] != "fields"]
            put_value(found, data.draw(st.sampled_from(here)), data.draw(values))

    file = tmp_path / "it"
    file.write_bytes(change_header(recording, edit))
    draw = ["replay-view", str(file)]
    commands = (
        ["replay", str(file)],
        ["replay", str(file), "--check"],
        [*draw, "--html", str(tmp_path / "page")],
        [*draw, "--timeline", str(tmp_path / "trace")],
    )
    code = main(data.draw(st.sampled_from(commands)))
    out, err = capsys.readouterr()
    assert code in (0, 1, 5, 6) and "internal error" not in err
    assert out.count("\n") + err.count("\n") <= 1


def test_a_header_nested_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it"
    with file.open("wb") as out:
        out.write(FIRST + b"3\n")
        write_frame(out, HEADER, b"[" * 100_000)
    assert main(["replay", str(file)]) == 6
    assert "its header is not JSON" in capsys.readouterr().err


def test_every_limit_and_every_field_of_a_group_has_a_rule() -> None:
    assert LIMIT_RULES.keys() | {"groups", "schedule", "policy", "cache", "length_hint"} == {
        each.name for each in attrs.fields(Limits) if each.init
    }
    assert GROUP_RULES.keys() == {each.name for each in attrs.fields(KVGroup)} - {"dtype"}
