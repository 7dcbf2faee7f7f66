"""What `headstock-conformance` says of itself."""

from __future__ import annotations

from source_tree import CONFORMANCE, ROOT, read_project


def test_it_wants_the_version_of_core_that_it_came_with() -> None:
    core, checks = read_project(ROOT / "core"), read_project(CONFORMANCE)
    assert f"headstock=={core['version']}" in checks["dependencies"]
    assert checks["version"] == core["version"]
