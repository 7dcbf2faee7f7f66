"""Runners construct no record of a step: a later field of it reaches them all."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest
from source_tree import PLUGINS, ROOT, files, read_project, tree

RECORDS = {"Batch", "AttentionStep", "Sampling", "Sample", "StepInputs"}
TAKEN_TO_PIECES = {"evolve", "fields", "fields_dict", "asdict", "astuple", "replace"}
"""What makes or enumerates a record without its name."""


def runner_sources() -> dict[str, list[Path]]:
    """Runner -> its source files: those of its package, or its module for one of core's."""
    sources = {}
    for member in [ROOT / "core", *PLUGINS]:
        runners = read_project(member).get("entry-points", {}).get("headstock.runner", {})
        for name, entry in runners.items():
            module, _, attribute = entry.partition(":")
            spec = getattr(import_module(module), attribute)()
            path = Path(str(import_module(spec.implementation.partition(":")[0]).__file__))
            sources[name] = files(path if member == ROOT / "core" else path.parent)
    return sources


def constructions(module: ast.Module) -> list[str]:
    """`line name` of each call that constructs or enumerates a record of a step."""
    renamed = {
        alias.asname: alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if renamed.get(name, name) in RECORDS | TAKEN_TO_PIECES:
                found.append(f"{node.lineno} {name}")
    return found


def test_no_runner_constructs_or_enumerates_a_record_of_a_step() -> None:
    sources = runner_sources()
    assert sources.keys() >= {"eager", "cudagraph"}
    assert len(sources["cudagraph"]) > 3
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for paths in sources.values()
        for path in paths
        for each in constructions(tree(path))
    ]
    assert found == [], "core's RowTables makes these records, and Sample.first parts of them"


@pytest.mark.parametrize(
    "source",
    [
        "batch = Batch(tokens=tokens)",
        "from headstock.spi import AttentionStep as Step\nstep = Step(phase=phase)",
        "from headstock import spi\nsampling = spi.Sampling()",
        "import attrs\nattrs.evolve(batch, tokens=tokens)",
        "names = fields_dict(Sample)",
    ],
)
def test_what_constructs_a_record_is_found(source: str) -> None:
    assert len(constructions(ast.parse(source))) == 1
