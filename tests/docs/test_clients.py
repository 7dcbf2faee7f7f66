"""The table of clients in docs/serving.md has the versions that nox installs."""

from __future__ import annotations

import json
import re

from source_tree import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
CLIENTS = ROOT / "tests/plugins/openai_server/clients"


def test_each_client_of_the_table_is_pinned_at_its_version() -> None:
    rows = re.findall(r"^\| `([^`]+)` of (PyPI|npm) \| (\S+) \|", PAGE, re.MULTILINE)
    # Those of all win: the table has each library at its newest version that is run.
    files = (*sorted(CLIENTS.glob("*/constraints.txt")), ROOT / "constraints.txt")
    texts = "".join(file.read_text() for file in files)
    pins = re.findall(r"^(\S+)==(\S+)$", texts, re.MULTILINE)
    packages = json.loads((CLIENTS / "npm" / "package.json").read_text())["dependencies"]
    pinned = {"PyPI": dict(pins), "npm": packages}
    assert [row for row in rows if pinned[row[1]].get(row[0]) != row[2]] == []
    assert len(rows) > 10
    assert [name for name in packages if f"`{name}`" not in PAGE] == []
