"""The contract changes only on purpose, and by as much as its versions say."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType

import pytest
import spi_lock
from contract_change import Level, compare, find_changes, find_violations, parse_contract, reach
from contract_stub import find_origins, make_stub
from source_tree import PLUGINS, files, imports, read_groups, tree
from spi_lock import LIBRARIES, LOCK, make_lock

from headstock import spi


def test_the_contract_is_what_spi_lock_says() -> None:
    before = LOCK.read_text()
    after = make_lock(locked=parse_contract(before).locked)
    assert find_violations(before, after) == []
    changes = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "spi.lock", "now", lineterm=""
    )
    assert "\n".join(changes) == "", (
        "if it was meant, run `python tests/spi_lock.py`; once the lock is locked, raise the "
        "versions in headstock.spi.SPI first, as docs/plugins.md says"
    )


def test_the_lock_holds_every_public_name() -> None:
    contract = parse_contract(LOCK.read_text())
    ours = {name for module, name in contract.names if module == "headstock.spi"}
    assert ours == set(spi.__all__) - {"SPI", "RESERVED"}
    modules = {module for module, _ in contract.names}
    assert {"headstock.nn.attention.device", "headstock.nn.rope", "headstock.ops.fine_tier"} < (
        modules
    )
    assert contract.versions == dict(spi.SPI)
    for kind in spi.SPI:
        assert contract.roots[kind], kind


CONTRACT = """
from __future__ import annotations
from abc import ABC, abstractmethod
from enum import Enum
from attrs import field, frozen

class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"

@frozen
class Place:
    page: int
    offset: int = 0

@frozen(kw_only=True)
class Step:
    rows: int
    phases: tuple[Phase, ...] = field(default=(Phase.DECODE,))
    sizes: list[int] = field(factory=list)

Event = int | str

def join(a: Step, b: Step, *, strict: bool = True) -> Step:
    return a

class Backend(ABC):
    @abstractmethod
    def run(self, step: Step, *, tag: str = "") -> None: ...
    def close(self) -> None: ...
    @property
    def size(self) -> int: return 0
"""

REVISIONS = {
    "a name": ("def join(", "def split(a: Step) -> None: ...\ndef join("),
    "an enum member": ('"decode"\n', '"decode"\n    EXTEND = "extend"\n'),
    "an optional field": ("    rows: int\n", "    rows: int\n    masks: int | None = None\n"),
    "an optional last place": ("offset: int = 0", "offset: int = 0\n    size: int = 1"),
    "a method": ("    def close", "    def open(self) -> None: ...\n    def close"),
    "a property": ("    @property", "    @property\n    def n(self) -> int: ...\n    @property"),
    "a keyword of a method": ('tag: str = ""', 'tag: str = "", head: int = 0'),
    "a keyword of a function": ("*, strict", "*, lazy: bool = False, strict"),
    "an event": ("int | str", "int | str | bytes"),
}
EDITIONS = {
    "a name removed": ("def join(", "def _join("),
    "a name renamed": ("class Place", "class Spot"),
    "a function for a class": (
        "@frozen\nclass Place:\n    page: int\n    offset: int = 0",
        "def Place(page: int) -> None: ...",
    ),
    "an enum member removed": ('    PREFILL = "prefill"\n', ""),
    "an enum member renamed": ("PREFILL =", "PROMPT ="),
    "an enum value changed": ('"prefill"', '"prompt"'),
    "enum members reordered": (
        '    PREFILL = "prefill"\n    DECODE = "decode"\n',
        '    DECODE = "decode"\n    PREFILL = "prefill"\n',
    ),
    "a field removed": ("    rows: int\n", ""),
    "a field renamed": ("    rows: int", "    count: int"),
    "a required field": ("    rows: int\n", "    rows: int\n    tokens: int\n"),
    "a field of another type": ("rows: int", "rows: float"),
    "a field's default": ("Phase.DECODE,)", "Phase.PREFILL,)"),
    "a field's factory": ("factory=list", "factory=tuple"),
    "a default for what was required": ("rows: int", "rows: int = 0"),
    "a field in front": ("    page: int\n", "    row: int = 0\n    page: int = 0\n"),
    "places reordered": (
        "page: int\n    offset: int = 0",
        "offset: int\n    page: int = 0",
    ),
    "places by keyword alone": ("@frozen\n", "@frozen(kw_only=True)\n"),
    "an abstract method": (
        "    def close",
        "    @abstractmethod\n    def open(self) -> None: ...\n    def close",
    ),
    "a method removed": ("    def close(self) -> None: ...\n", ""),
    "a method made abstract": ("    def close", "    @abstractmethod\n    def close"),
    "a property made a method": ("    @property\n", ""),
    "a constructor": (
        "    def close",
        "    def __init__(self, x: int) -> None: ...\n    def close",
    ),
    "an argument by position": ("step: Step, *", "step: Step, last: bool = False, *"),
    "an argument renamed": ("a: Step", "first: Step"),
    "arguments reordered": ("a: Step, b: Step", "b: Step, a: Step"),
    "an argument of another type": ("a: Step", "a: int"),
    "a required keyword": ("strict: bool = True", "strict: bool = True, lazy: bool"),
    "a keyword's default": ("strict: bool = True", "strict: bool = False"),
    "a keyword removed": (", *, strict: bool = True", ""),
    "another result": ("= True) -> Step", "= True) -> int"),
    "an event removed": ("int | str", "int"),
    "another alias": ("int | str", "float | str"),
    "another base": ("Phase(Enum)", "Phase(str, Enum)"),
}
NOTHING = {
    "fields by keyword reordered": (
        "    sizes: list[int] = field(factory=list)\n",
        "",
    ),
    "a private method": ("    def close", "    def _open(self) -> None: ...\n    def close"),
    "a docstring": ("class Place:", 'class Place:\n    """Where a token lies."""'),
    "a body": ("return a", "return b"),
}


@pytest.fixture
def lock_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Make the lock of a contract of one kind from the source of its module."""

    def make(source: str, *, version: tuple[int, int, int] = (0, 2, 0), locked: bool = True) -> str:
        folder = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
        package = folder / "toy_contract"
        package.mkdir(parents=True)
        (package / "step.py").write_text(source)
        names = [
            node.targets[0].id if isinstance(node, ast.Assign) else node.name
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign | ast.ClassDef | ast.FunctionDef)
        ]
        public = [name for name in names if not name.startswith("_")]
        (package / "__init__.py").write_text(
            f"from toy_contract.step import {', '.join(public)}\n__all__ = {public!r}\n"
        )
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            invalidate_caches()
            stub = make_stub(import_module("toy_contract"))
        for module in ("toy_contract", "toy_contract.step"):
            del sys.modules[module]
        stub = stub.replace("'toy_contract'", "'headstock.spi'")
        return (
            f"locked = {locked}\nversions = {{'toy': {version}}}\n"
            f"roots = {{'toy': ('Backend',)}}\nlibraries = {{}}\n{stub}"
        )

    return make


def level_of(before: str, after: str) -> Level:
    changes = find_changes(parse_contract(before), parse_contract(after))
    return max(changes.get("toy", {}).values(), default=Level.SAME)


CASES = [
    *((name, *texts, Level.REVISION) for name, texts in REVISIONS.items()),
    *((name, *texts, Level.EDITION) for name, texts in EDITIONS.items()),
    *((name, *texts, Level.SAME) for name, texts in NOTHING.items()),
]


@pytest.mark.parametrize(
    ("old", "new", "level"), [each[1:] for each in CASES], ids=[each[0] for each in CASES]
)
def test_what_is_added_is_a_revision_and_all_else_an_edition(
    lock_of: Callable[..., str], old: str, new: str, level: Level
) -> None:
    assert CONTRACT.count(old) >= 1
    changed = CONTRACT.replace(old, new, 1)
    if old == NOTHING["fields by keyword reordered"][0]:
        changed = changed.replace("    rows: int\n", old + "    rows: int\n")
    before = lock_of(CONTRACT)
    assert level_of(before, lock_of(changed)) is level
    wanted = {Level.SAME: (0, 2, 0), Level.REVISION: (0, 2, 1), Level.EDITION: (0, 3, 0)}[level]
    for version in ((0, 2, 0), (0, 2, 1), (0, 3, 0)):
        problems = find_violations(before, lock_of(changed, version=version))
        assert (problems == []) is (version >= wanted)
    open_lock = lock_of(CONTRACT, locked=False)
    assert find_violations(open_lock, lock_of(changed, locked=False)) == []


def test_a_lock_stays_locked_and_versions_only_rise(lock_of: Callable[..., str]) -> None:
    before = lock_of(CONTRACT, version=(0, 2, 3))
    assert find_violations(before, before) == []
    (unlocked,) = find_violations(before, lock_of(CONTRACT, version=(0, 2, 3), locked=False))
    assert "cannot be unlocked" in unlocked
    (lowered,) = find_violations(before, lock_of(CONTRACT, version=(0, 2, 2)))
    assert "a version is never lowered" in lowered
    (gone,) = find_violations(before, before.replace("'toy': (0, 2, 3)", ""))
    assert gone.startswith("toy: the kind is gone")


SHARED = """
locked = True
versions = {'attention': (0, 2, 0), 'cache': (0, 2, 5), 'runner': (0, 2, 0), 'ops': (0, 3, 1)}
roots = {'attention': ('Backend',), 'cache': ('Policy',), 'runner': ('Runner',), 'ops': ('Ops',)}
libraries = {'headstock.nn': ('attention', 'ops'), 'headstock.ops': ('ops',)}
module = 'headstock.spi'
class Batch:
    sampling: Sampling
class Sampling:
    seed: int
class Page:
    number: int
class Unnamed:
    x: int
Attend = Callable[['Batch'], None]
class Backend:
    def plan(self, page: Page) -> None: ...
class Policy(Base):
    ...
class Base:
    def pages(self) -> tuple[Page, ...]: ...
class Runner:
    attend: Attend
class Ops:
    def embed(self, batch: Batch | None = None) -> None: ...
module = 'headstock.nn.rope'
def rotate(x: Tensor) -> Tensor: ...
module = 'headstock.ops.torch_ops'
def embed(x: Tensor) -> Tensor: ...
"""


@pytest.mark.parametrize(
    ("old", "new", "raised"),
    [
        ("seed: int", "seed: int\n    mask: int = 0", {"runner": (0, 2, 1), "ops": (0, 3, 2)}),
        ("seed: int", "seeds: int", {"runner": (0, 3, 0), "ops": (0, 4, 0)}),
        ("number: int", "index: int", {"attention": (0, 3, 0), "cache": (0, 3, 0)}),
        ("rotate(x: Tensor)", "rotate(y: Tensor)", {"attention": (0, 3, 0), "ops": (0, 4, 0)}),
        ("embed(x: Tensor)", "embed(x: Tensor, *, y: int = 0)", {"ops": (0, 3, 2)}),
        (
            "    x: int",
            "    x: int\n    y: int = 0",
            {"attention": (0, 2, 1), "cache": (0, 2, 6), "runner": (0, 2, 1), "ops": (0, 3, 2)},
        ),
    ],
    ids=["field", "rename", "base", "library", "one-library", "unreached"],
)
def test_a_changed_record_raises_every_kind_whose_signatures_reach_it(
    old: str, new: str, raised: dict[str, tuple[int, int, int]]
) -> None:
    changed = SHARED.replace(old, new, 1)
    problems = find_violations(SHARED, changed)
    assert [problem.partition(":")[0] for problem in problems] == list(raised)
    for problem, version in zip(problems, raised.values(), strict=True):
        assert f"wanted at least {version}" in problem
    versions = {**parse_contract(SHARED).versions, **raised}
    header = SHARED.splitlines()[2]
    assert find_violations(SHARED, changed.replace(header, f"versions = {versions}")) == []
    for kind in raised:
        short = f"versions = {versions | {kind: parse_contract(SHARED).versions[kind]}}"
        (problem,) = find_violations(SHARED, changed.replace(header, short))
        assert problem.startswith(f"{kind}: ")


def test_a_new_kind_raises_no_other() -> None:
    more = SHARED.replace("'ops': (0, 3, 1)}", "'ops': (0, 3, 1), 'grammar': (0, 2, 0)}")
    more = more.replace("'ops': ('Ops',)}", "'ops': ('Ops',), 'grammar': ('Grammar',)}")
    more = more.replace("class Batch:", "class Grammar:\n    mask: int\nclass Batch:", 1)
    assert find_violations(SHARED, more) == []


def test_kinds_reach_what_their_plugins_are_given() -> None:
    contract = parse_contract(LOCK.read_text())
    for kind, names in {
        "attention": {"AttentionStep", "LayerInfo", "Phase", "PluginSpec", "SpiRange", "IntSet"},
        "runner": {"Batch", "Sampling", "ModelConfig", "Ops", "AttentionBackend", "PluginSpec"},
        "ops": {"Batch", "Sample", "ModelConfig"},
        "cache": {"Match", "Inserted", "IntSet"},
    }.items():
        assert names <= reach(contract, contract.roots[kind]), kind
    assert "Batch" not in reach(contract, contract.roots["cache"])
    origins = find_origins(spi)
    assert origins["Attend"] == "headstock.spi.model"


def test_the_lock_is_not_rewritten_unless_the_versions_rise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = make_lock(locked=True)
    path = tmp_path / "spi.lock"
    monkeypatch.setattr(spi_lock, "LOCK", path)
    path.write_text(now.replace("    num_rows", "    rows", 1).replace("class Match", "class Hit"))
    before = path.read_text()
    assert spi_lock.main([]) == 1
    assert "headstock.spi.Match (revision)" in capsys.readouterr().err
    assert path.read_text() == before
    path.write_text(before.replace("locked = True", "locked = False"))
    assert spi_lock.main(["--lock"]) == 0
    assert path.read_text() == now
    assert spi_lock.main([]) == 0


def test_a_plugin_imports_only_the_libraries_of_its_kind() -> None:
    found = [
        f"{path.name}: {each.name}"
        for member in PLUGINS
        for kinds in [{group.partition(".")[2] for group in read_groups(member)}]
        if kinds not in ({"command"}, set())
        for package, allowed in LIBRARIES.items()
        if not kinds & set(allowed)
        for path in files(member / "src")
        for each in imports(tree(path))
        if each.inside(package)
    ]
    assert found == []


def test_the_stub_of_a_value_depends_on_no_process() -> None:
    assert " at 0x" not in LOCK.read_text()
    module = ModuleType("toy")
    module.__all__ = ["NAMES", "LIMIT"]  # type: ignore[attr-defined]
    module.NAMES, module.LIMIT = {"a", "b"}, 3  # type: ignore[attr-defined]
    assert make_stub(module).split("\n")[2:] == ["LIMIT: int = 3", "", "NAMES: set", ""]
    assert compare(None, None) is Level.EDITION
