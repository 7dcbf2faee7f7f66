"""Model directories as hostile input: every one is refused in one line, and nothing in it runs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.errors import ModelError
from headstock.weights import read_config, resolve_directory
from headstock.weights.directory import weight_files
from headstock.weights.safetensors_header import read_header

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F16", "shape": [1, 2], "data_offsets": [8, 12]},
}


def write_file(directory: Path, header: Any, *, length: int | None = None, data: int = 12) -> Path:
    """A file in safetensors layout with any header, any stated length of it and `data` zero
    bytes.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)
    )
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        read_header(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_good_header_is_read(tmp_path: Path) -> None:
    entries = read_header(write_file(tmp_path, {"__metadata__": {"format": "pt"}, **GOOD}))

    assert [(name, e.dtype, e.shape, e.nbytes) for name, e in entries.items()] == [
        ("a", "F32", (2,), 8),
        ("b", "F16", (1, 2), 4),
    ]


@pytest.mark.parametrize(
    ("header", "changes", "message"),
    [
        (GOOD, {"length": 2**63}, "a header of 9223372036854775808 bytes cannot be in a file of"),
        (GOOD, {"length": 10_000}, "the file is damaged: copy or download it again"),
        (
            GOOD,
            {"data": 11},
            (
                "the tensors take 12 bytes, but the file has 11 for them; the file is damaged: "
                "copy or download it again"
            ),
        ),
        (GOOD, {"data": 13}, "but the file has 13 for them"),
        (b"{", {}, "the header is not JSON"),
        (b"\xff\xfe", {}, "the header is not JSON"),
        (b"[" * 100_000, {}, "the header is not JSON"),
        (b"[]", {}, "the header: expected a JSON object, got list"),
        (b'{"a": 1, "a": 2}', {}, "a name comes twice"),
        ({"a": []}, {}, "a has no proper dtype, shape and data_offsets"),
        ({"a": {**GOOD["a"], "shape": [-2]}}, {}, "no proper dtype"),
        ({"a": {**GOOD["a"], "shape": [True, 2]}}, {}, "no proper dtype"),
        ({"a": {**GOOD["a"], "dtype": "Q4"}}, {}, "a: expected one of F64, "),
        ({"a": {**GOOD["a"], "shape": [2**40, 2**40]}}, {}, "but has 8 bytes in the header"),
        (
            {**GOOD, "b": {**GOOD["b"], "data_offsets": [4, 8]}},
            {"data": 8},
            "b overlaps another tensor",
        ),
        (
            {**GOOD, "b": {**GOOD["b"], "data_offsets": [10, 14]}},
            {"data": 14},
            "b leaves a gap before it",
        ),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [-4, 0]}}, {}, "b overlaps another tensor"),
        ({"a": {**GOOD["a"], "data_offsets": [2**70, 2**70 + 8]}}, {}, "leaves a gap before it"),
    ],
)
def test_a_lying_header_is_refused(
    tmp_path: Path, header: Any, changes: dict[str, int], message: str
) -> None:
    assert message in refusal(write_file(tmp_path, header, **changes))


@pytest.mark.parametrize("size", [0, 7, 8, 60])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_file(tmp_path, GOOD)
    path.write_bytes(path.read_bytes()[:size])

    refusal(path)


@settings(
    max_examples=count_examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = write_file(tmp_path, GOOD)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)

    with suppress(ModelError):
        length = int.from_bytes(content[:8], "little")
        assert (
            sum(entry.nbytes for entry in read_header(path).values()) == len(content) - 8 - length
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "expected a JSON object, got list"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError) as error:
        read_config(tmp_path)

    assert message in str(error.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")

    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Unpickling this file would make a marker."""
    marker = tmp_path / "marker"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    )

    with pytest.raises(ModelError, match=r"only as pickles \(pytorch_model\.bin\)"):
        weight_files(tmp_path)

    assert not marker.exists()


def test_a_config_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (model / "config.json").symlink_to(tmp_path / "secret.json")

    with pytest.raises(ModelError, match="leads out of the directory"):
        read_config(model)


def test_a_config_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")

    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_local_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "./no/such", "/no/such/dir", "a/b/c", "../x", "~nobody-at-all/x", "x" * 9999],
)
def test_what_is_neither_a_directory_nor_a_hub_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="give an existing directory, or owner/name"):
        resolve_directory(name)
