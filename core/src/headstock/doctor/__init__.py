"""What works on this machine, found out by checks that do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.config import EngineConfig
from headstock.doctor.finding import Check, Finding, Status, failed, findings, passed

if TYPE_CHECKING:
    from headstock.doctor.situation import Model

__all__ = ["Finding", "Status", "examine", "examine_parts"]


def examine(config: EngineConfig) -> Iterator[Finding]:
    """All findings about this machine, the installed plugins and the model of `config`, in the
    order of the checks.
    """
    from headstock.doctor import machine, software

    checks: dict[str, Check] = {
        "python": software.python,
        "torch": software.torch,
        "tools": software.tools,
        "memory": machine.memory,
        "encoding": machine.encoding,
        "hub": machine.hub,
    }
    for subject, check in checks.items():
        yield from findings(subject, check)
    yield from examine_parts(config)


def examine_parts(config: EngineConfig) -> Iterator[Finding]:
    """All findings about plugins, the model, and the plugins that would be chosen, as `run` would
    meet them.
    """
    from headstock.doctor import plugins

    try:
        from headstock.doctor.situation import look  # which needs torch
    except (ImportError, OSError) as error:
        yield from findings("plugins", lambda: plugins.plugins(lambda spec: ""))
        yield failed("choice", str(error), "")
        return
    situation = look(config)
    yield from findings("plugins", lambda: plugins.plugins(situation.unfit))
    yield from situation.problems
    if situation.model is not None:
        yield passed("config.json", situation.model.config.architecture)
        yield from findings("choice", situation.choice)
    if situation.directory is not None:
        yield from examine_files(
            situation.directory, situation.model, dummy=config.load_format == "dummy"
        )


def examine_files(directory: Path, model: Model | None, *, dummy: bool) -> Iterator[Finding]:
    """All findings about the files of a model beside its config.json; `model` is None when that
    cannot be read.
    """
    from headstock.doctor import model as checks

    if not dummy:
        yield from findings("weights", lambda: checks.weights(directory, model))
    yield from findings("tokenizer", lambda: checks.tokenizer(directory, model))
    yield from findings("generation_config.json", lambda: checks.generation(directory))
