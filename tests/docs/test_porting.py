"""The tables from 0.2 to 0.3 of docs/plugins.md have every name that a port meets, as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest
from contract_change import parse_contract
from source_tree import ROOT
from spi_lock import LOCK

from headstock import spi
from headstock.nn.parameters import parameters
from headstock_conformance.ops.models import (
    list_configs,
    make_delta_config,
    make_latent_config,
    make_state_config,
)

PAGE = ROOT / "docs" / "plugins.md"
BEFORE = Path(__file__).with_name("spi-0.2.lock")
"""The contract of 0.2 as its lock had it."""
Members = Mapping[str, frozenset[str]]


def read_members(lock: Path) -> Members:
    """The members of each name of a contract."""
    found: dict[str, frozenset[str]] = {}
    for (_, name), node in parse_contract(lock.read_text()).names.items():
        members = set[str]()
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                members.add(each.target.id)
            elif isinstance(each, ast.FunctionDef):
                members.add(each.name)
        found[name] = frozenset(members - {"_"})
    return found


THEN, NOW = read_members(BEFORE), read_members(LOCK)


def read_rows() -> list[tuple[str, str]]:
    """The two cells of each row of the tables."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("### From 0.2 to 0.3") : text.index("#### Names of parameters")]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)
    return [(one, other) for one, other in rows if one not in ("0.2", "---")]


def list_names(cell: str) -> Iterator[tuple[str, str]]:
    """The names of a cell: class and member, or a function by its path; a member without a class is
    of the one before.
    """
    owner = ""
    for span in re.findall(r"`([^`]+)`", cell):
        plain = span.partition("(")[0]
        head, dot, member = plain.partition(".")
        if function := re.fullmatch(r"headstock\.\w+\.\w+\.(\w+)", plain):
            yield function[1], ""
        elif dot and re.fullmatch(r"[A-Z]\w+", head):
            owner = head
            yield head, member
        elif re.fullmatch(r"[A-Z]\w+", plain) or plain in THEN.keys() - NOW.keys():
            yield plain, ""
        elif owner and re.fullmatch(r"\w+", plain):
            yield owner, plain


def list_gone() -> Iterator[tuple[str, str]]:
    """What 0.2 had and today's contract lacks."""
    for name, members in THEN.items():
        if name not in NOW:
            yield name, ""
        else:
            yield from ((name, member) for member in sorted(members - NOW[name]))


GONE = list(list_gone())
WRITTEN = {named for before, _ in read_rows() for named in list_names(before)}


def test_the_contract_of_0_2_is_read() -> None:
    assert "capture_plan" in THEN["AttentionBackend"] and "hidden" in THEN["ModelConfig"]
    assert len(THEN) > 100 and ("Runner", "decode") in GONE and ("PromptStep", "") in GONE


@pytest.mark.parametrize("named", GONE, ids=lambda named: ".".join(filter(None, named)))
def test_every_name_that_is_gone_has_a_row(named: tuple[str, str]) -> None:
    assert named in WRITTEN


CHANGED = [
    ("Runner", "run"),
    ("PromptStep", "num_logits"),
    ("RowTables", "batch"),
    ("Ops", "embed"),
]
"""What kept its name and has another form."""


@pytest.mark.parametrize("named", CHANGED, ids=lambda named: ".".join(filter(None, named)))
def test_every_name_of_another_form_has_a_row(named: tuple[str, str]) -> None:
    assert named in WRITTEN


@pytest.mark.parametrize(("column", "contract"), [(0, THEN), (1, NOW)], ids=["0.2", "0.3"])
def test_names_of_a_column_are_names_of_that_contract(column: int, contract: Members) -> None:
    for row in read_rows():
        for name, member in list_names(row[column]):
            assert name in contract, name
            assert not member or member in contract[name], (name, member)


def test_modules_and_functions_of_0_3_are_there() -> None:
    for _, cell in read_rows():
        for path in re.findall(r"`(headstock\.[\w.]+)`", cell):
            module, _, name = path.rpartition(".")
            assert hasattr(import_module(module), name) or import_module(path)


def test_names_of_parameters_are_those_of_models() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("#### Names of parameters") : text.index("## Entry-point groups")]
    rows = re.findall(r"^\| .+ \| (`.+) \|$", section, re.MULTILINE)
    written = {name for row in rows for name in re.findall(r"`([a-z][\w.]+)`", row)}
    written |= set(re.findall(r"`(layers\.N\.\w+)`", section))
    configs = [
        *list_configs().values(),
        make_latent_config(),
        make_state_config(),
        make_delta_config(),
    ]
    names = {
        re.sub(r"layers\.\d+", "layers.N", name)
        for config in configs
        for name in parameters(config)
        if not name.endswith(".bias")
    }
    assert written == names
    plain = {name.removeprefix("layers.N.") for name in names}
    assert spi.Ops.__doc__ is not None
    missing = {name for name in plain if not re.search(rf"\b{name}\b", spi.Ops.__doc__)}
    assert missing == set()
