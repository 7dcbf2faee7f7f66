"""The tables from 0.2 to 0.3 of docs/plugins.md have every name that a port meets, as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import attrs
import pytest
from contract_change import parse_contract
from source_tree import ROOT
from spi_lock import LOCK

from headstock import spi
from headstock.conformance.ops.models import (
    list_configs,
    make_latent_config,
    make_state_config,
)
from headstock.nn.parameters import parameters

PAGE = ROOT / "docs" / "plugins.md"
BEFORE = Path(__file__).with_name("spi-0.2.lock")
"""The contract of 0.2 as its lock had it."""
NOT_COUNTED = {"SPI", "RESERVED"}

Members = Mapping[str, frozenset[str]]


def read_before() -> Members:
    """What 0.2 had: the members of each name."""
    found: dict[str, frozenset[str]] = {}
    for (_, name), node in parse_contract(BEFORE.read_text()).names.items():
        body = node.body if isinstance(node, ast.ClassDef) else []
        members = {
            each.target.id if isinstance(each, ast.AnnAssign) else each.name
            for each in body
            if isinstance(each, ast.FunctionDef)
            or (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name))
        }
        found[name] = frozenset(members) - {"_"}
    return found


def read_now() -> frozenset[str]:
    """The names of today's contract."""
    return frozenset(name for _, name in parse_contract(LOCK.read_text()).names)


def has_member(name: str, member: str) -> bool:
    """Whether a class of today's contract has the member."""
    kind = getattr(spi, name)
    names = {each.name for each in attrs.fields(kind)} if attrs.has(kind) else set()
    return member in names or hasattr(kind, member)


def read_rows() -> list[tuple[str, str]]:
    """The two cells of each row of the tables."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("### From 0.2 to 0.3") : text.index("#### Names of parameters")]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)
    return [(one, other) for one, other in rows if one not in ("0.2", "---")]


def list_names(cell: str) -> Iterator[tuple[str, str]]:
    """The names of a cell: class and member; a member without a class is of the one before."""
    owner = ""
    for span in re.findall(r"`([^`]+)`", cell):
        plain = span.partition("(")[0]
        head, dot, member = plain.partition(".")
        if dot and re.fullmatch(r"[A-Z]\w+", head):
            owner = head
            yield head, member
        elif re.fullmatch(r"[A-Z]\w+", plain):
            yield plain, ""
        elif owner and re.fullmatch(r"\w+", plain):
            yield owner, plain


def list_gone() -> Iterator[tuple[str, str]]:
    """What 0.2 had and today's contract lacks."""
    now = read_now()
    for name, members in read_before().items():
        if name in NOT_COUNTED:
            continue
        if name not in now:
            yield name, ""
            continue
        for member in members:
            if not has_member(name, member):
                yield name, member


GONE = list(list_gone())
WRITTEN = {named for before, _ in read_rows() for named in list_names(before)}


def test_the_contract_of_0_2_is_read() -> None:
    before = read_before()
    assert "capture_plan" in before["AttentionBackend"] and "hidden" in before["ModelConfig"]
    assert len(before) > 100


@pytest.mark.parametrize("named", GONE, ids=lambda named: ".".join(filter(None, named)))
def test_every_name_that_is_gone_has_a_row(named: tuple[str, str]) -> None:
    assert named in WRITTEN


CHANGED: list[tuple[str, str]] = []
"""What kept its name and has another form."""


@pytest.mark.parametrize("named", CHANGED, ids=lambda named: ".".join(filter(None, named)))
def test_every_name_of_another_form_has_a_row(named: tuple[str, str]) -> None:
    assert named in WRITTEN


def test_names_of_0_2_are_names_of_0_2() -> None:
    before = read_before()
    new = {"must have", "may read", "may name"}
    for cell, _ in read_rows():
        for name, member in list_names(cell) if cell not in new else ():
            assert name in before, name
            assert not member or member in before[name], (name, member)


def test_names_of_0_3_are_names_of_0_3() -> None:
    now = read_now()
    for _, cell in read_rows():
        for name, member in list_names(cell):
            assert name in now, name
            assert not member or has_member(name, member), (name, member)


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
    configs = [*list_configs().values(), make_latent_config(), make_state_config()]
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
