"""docs/structure.md draws the arrows that the imports of core have, and a README the server's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

from source_tree import CONFORMANCE, CORE, ROOT, files, imports, tree

PAGE = (ROOT / "docs" / "structure.md").read_text()
SERVER = ROOT / "plugins" / "openai-server"
ANYONE = {
    *("spi", "errors", "logs", "outputs", "callbacks", "distributions"),
    *("sampling_params", "sampling_checks", "structured_outputs"),
}
"""What every folder may import."""


def drawn_arrows(page: str) -> dict[str, set[str]]:
    """Folder or front module -> the folders that the page says it imports."""
    whole = re.sub(r",\n {8,}", ", ", page)  # a long list goes on in the next line
    lines = re.findall(r"^    (\w+) +->  (.+)$", whole, re.MULTILINE)
    return {name: set(targets.split(", ")) for name, targets in lines}


def found_arrows() -> dict[str, set[str]]:
    """The same, as the syntax trees of core have it, less what every folder may import."""
    arrows: dict[str, set[str]] = {}
    for path in files(CORE):
        origin, *rest = path.relative_to(CORE).with_suffix("").parts
        if origin in ANYONE | {"__init__", "__main__"} or not (rest or origin == "llm"):
            continue
        arrows.setdefault(origin, set()).update(find_rooms([path]) - {origin})
    return arrows


def find_rooms(paths: Iterable[Path]) -> set[str]:
    """The folders and front modules of core that files import, less what every folder may."""
    names = [line.name.split(".") for path in paths for line in imports(tree(path))]
    return {name[1] for name in names if name[0] == "headstock" and len(name) > 1} - ANYONE


def test_the_page_draws_every_arrow_between_folders_and_no_other() -> None:
    drawn = drawn_arrows(PAGE)
    assert drawn.pop("plugins") == {"nn", "ops", "spi"}
    assert drawn.pop("conformance") == find_rooms(files(CONFORMANCE / "src"))
    assert {name: targets for name, targets in found_arrows().items() if targets} == drawn


def test_the_servers_readme_draws_every_arrow_between_its_folders_and_there_is_no_circle() -> None:
    page, source = (SERVER / "README.md").read_text(), SERVER / "src" / "headstock_openai_server"
    arrows: dict[str, set[str]] = {}
    for path in files(source):
        origin = path.relative_to(source).with_suffix("").parts[0]
        names = [line.name.split(".") for line in imports(tree(path))]
        targets = {name[1] for name in names if name[0] == source.name} - {origin, "settings"}
        arrows[origin] = arrows.get(origin, set()) | targets
    del arrows["command"]  # it imports any of them
    assert {name: targets for name, targets in arrows.items() if targets} == drawn_arrows(page)
    TopologicalSorter(arrows).prepare()


def test_every_folder_and_module_that_the_page_names_exists() -> None:
    folders = {path.parent.name for path in CORE.glob("*/*.py")}
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    modules = {path.stem for path in files(CORE)}
    plain = [name for name in named if re.fullmatch(r"[a-z_]+", name)]
    assert [name for name in plain if name not in folders | modules] == []
    paths = [name for name in named if "/" in name]
    assert [
        name for name in paths if not any((base / name).exists() for base in (ROOT, CORE))
    ] == []
