"""What the engine reads of the machine that it runs on."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from headstock.startup.device import read_versions


def test_versions_are_those_that_the_metadata_gives() -> None:
    packages = [distribution.metadata for distribution in distributions()]
    assert read_versions() == {each["Name"]: each["Version"] for each in packages if each["Name"]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_description_that_looks_like_a_header_is_not_read(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "drawn-1.0.dist-info"
    info.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: drawn", "Version:  1.0 ", "", "Name: other", "")
    (info / "METADATA").write_bytes(end.join(lines).encode())
    (tmp_path / "empty-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    versions = read_versions()
    assert versions["drawn"] == "1.0" and "other" not in versions
