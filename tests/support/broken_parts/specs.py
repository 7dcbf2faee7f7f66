"""The specs of the broken plugins, by `KIND__NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

import headstock_qwen.plugin
import headstock_radix_cache.plugin
import headstock_sdpa.plugin
from headstock.builtin import specs
from headstock.spi import (
    CheckpointSpec,
    CommandSpec,
    GrammarSpec,
    LogitsSpec,
    PluginSpec,
    ProposerSpec,
    SpiRange,
    ToolParserSpec,
)

from . import checkpoints
from .cases import CASES, Broken

SPI = SpiRange(0, 3)


def entry_name(case: Broken) -> str:
    """The attribute of this module that makes the case's spec."""
    return f"{case.kind}__{case.name.replace('-', '_')}"


PLAIN: Mapping[str, type[PluginSpec]] = {
    "command": CommandSpec,
    "grammar": GrammarSpec,
    "logits": LogitsSpec,
    "proposer": ProposerSpec,
    "tools": ToolParserSpec,
}
"""Kinds whose specs claim nothing."""


def make_spec(case: Broken) -> PluginSpec | CheckpointSpec:
    """The spec of a case: that of a sound plugin, with another implementation."""
    if case.kind == "checkpoint":
        directory: Any = getattr(checkpoints, case.path.partition(":")[2])
        return CheckpointSpec(name=case.name, spi=SPI, summary="broken", directory=directory)
    own = {"name": case.name, "implementation": f"broken_parts.{case.path}"}
    plain = {**own, "spi": SPI, "summary": "broken"}
    if case.kind in PLAIN:
        return PLAIN[case.kind](**plain)
    sound: dict[str, Callable[[], PluginSpec]] = {
        "attention": headstock_sdpa.plugin.spec,
        "cache": headstock_radix_cache.plugin.spec,
        "scheduler": specs.mixed,
        "runner": specs.eager,
        "ops": specs.torch_ops,
        "model": headstock_qwen.plugin.qwen3,
    }
    if case.kind == "attention":
        own["resolve"] = f"broken_parts.{case.resolve}" if case.resolve else None
        claims = headstock_sdpa.plugin.spec().capabilities
        own["capabilities"] = evolve(claims, features=frozenset())
    return evolve(sound[case.kind](), **own, options=None)


def __getattr__(name: str) -> Any:
    """The function behind an entry point."""
    for case in CASES:
        if entry_name(case) == name:
            return lambda: make_spec(case)
    raise AttributeError(name)


def install(folder: Path) -> None:
    """Put the metadata of a distribution with all cases into `folder`, for `sys.path`."""
    info = folder / "broken_parts-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-parts\nVersion: 1\n")
    kinds = dict.fromkeys(case.kind for case in CASES)
    lines = []
    for kind in kinds:
        lines.append(f"[headstock.{kind}]")
        lines += [
            f"{case.name} = broken_parts.specs:{entry_name(case)}"
            for case in CASES
            if case.kind == kind
        ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
