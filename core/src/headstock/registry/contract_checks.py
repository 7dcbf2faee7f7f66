"""Check whether a plugin was made for the version of the contract that this core offers."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from headstock.errors import shorten
from headstock.registry.entries import InstalledPlugin
from headstock.registry.first_party import upgrade_line
from headstock.spi.versions import SPI, SpiRange, format_version

_WRITTEN_RANGE = re.compile(rb"SpiRange\s*\(([^)]*)\)")

Contract = Mapping[str, tuple[int, int, int]]
"""Kind of plugin -> (major, edition, revision)."""


def explain_mismatch(
    plugin: InstalledPlugin, declared: SpiRange, contract: Contract = SPI
) -> str | None:
    """Explain in one line that the plugin was made for another version; None when it fits."""
    offered = contract[plugin.kind]
    if declared.accepts(offered):
        return None
    # Whichever side is older is the one to upgrade.
    newer = (declared.major, declared.edition, declared.revision) > offered
    side = "headstock" if newer else plugin.distribution
    return (
        f"{plugin} was made for version {declared} of the {plugin.kind} contract; this headstock "
        f"offers {format_version(offered)}; upgrade {side}: {upgrade_line(side)}; to port a "
        "plugin, read docs/plugins.md#versions-of-the-contract"
    )


def find_mismatch(plugin: InstalledPlugin, contract: Contract = SPI) -> str | None:
    """Explain that the plugin's source declares a version that does not fit; no plugin code runs.

    None when it fits, and when the source cannot be read or declares no version in plain numbers.
    """
    module, _, attribute = plugin.target.partition(":")
    try:
        path = _find_source(module.strip())
        source = b"" if path is None else path.read_bytes()
        # To parse the sources of 50 plugins takes 40 ms, and most name only what is offered.
        if _names_only(source, contract[plugin.kind]):
            return None
        declared = _read_declared_range(ast.parse(source), attribute.partition("[")[0].strip())
    # Whatever cannot be found or parsed is reported where the plugin is loaded.
    except (OSError, SyntaxError, ValueError, ImportError, AttributeError, RecursionError):
        return None
    return None if declared is None else explain_mismatch(plugin, declared, contract)


def explain_absent_module(plugin: InstalledPlugin) -> str:
    """Explain that the module of an entry point does not exist; no plugin code runs.

    Empty when it does, and when only an import could tell.
    """
    module = plugin.target.partition(":")[0].strip()
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)
        if spec is None:
            return f"there is no module {shorten(top)!r}"
        folders = spec.submodule_search_locations
        if not inner or folders is None or (len(inner) == 1 and not folders):
            return ""
        found = any(
            each.is_dir() or any(each.parent.glob(f"{inner[-1]}.*"))
            for each in (Path(folder, *inner) for folder in folders)
        )
    except (OSError, ValueError, ImportError, AttributeError):
        return ""
    return "" if found else f"there is no module {shorten(module)!r}"


def _names_only(source: bytes, offered: tuple[int, int, int]) -> bool:
    """Whether all that is written as `SpiRange(...)`, in comments too, accepts `offered`."""
    try:
        ranges = [SpiRange(*map(int, text.split(b","))) for text in _WRITTEN_RANGE.findall(source)]
    except (TypeError, ValueError):
        return False
    return all(declared.accepts(offered) for declared in ranges)


def _read_declared_range(tree: ast.Module, function: str) -> SpiRange | None:
    """Read the one `SpiRange(...)` of a function in a module, or else of the module."""
    places = [node for node in tree.body if getattr(node, "name", None) == function]
    for place in (*places, tree):
        declared = set(_list_ranges(place))
        if declared:
            return declared.pop() if len(declared) == 1 else None
    return None


def _find_source(module: str) -> Path | None:
    """The source file of a module, found without importing its package."""
    top, *inner = module.split(".")
    # Of the top-level package alone: `find_spec` of a module in it would import the package.
    spec = find_spec(top)
    if spec is None:
        return None
    if not inner:
        return None if spec.origin is None else Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _list_ranges(tree: ast.AST) -> Iterator[SpiRange]:
    """The calls of SpiRange below a node whose arguments are plain numbers."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="SpiRange") | ast.Attribute(attr="SpiRange"),
                args=args,
                keywords=[],
            ):
                numbers = [each.value for each in args if isinstance(each, ast.Constant)]
                if len(numbers) == len(args):
                    # Invalid versions are reported when the plugin is loaded.
                    with contextlib.suppress(TypeError, ValueError):
                        yield SpiRange(*numbers)  # type: ignore[arg-type]
