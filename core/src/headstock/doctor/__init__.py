"""What works on this machine, found out by checks that do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.config import EngineConfig
from headstock.doctor.finding import Check, Finding, Status, failed, findings
from headstock.errors import HeadstockError

if TYPE_CHECKING:
    from headstock.doctor.situation import Situation

__all__ = ["Finding", "Status", "examine", "examine_parts"]


def examine(config: EngineConfig) -> Iterator[Finding]:
    """All findings about this machine, the installed plugins and the model of `config`, in the order of the checks."""
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
    """All findings about plugins, those that would be chosen, and the model's files."""
    from headstock.doctor import model, plugins

    try:
        directory = model.directory_of(config.model)
    except HeadstockError as error:
        yield from findings("plugins", lambda: plugins.plugins(lambda spec: ""))
        yield failed(f"model {config.model}", str(error), "", error.exit_code)
        return
    here = look(config, directory)
    if isinstance(here, Finding):
        yield from findings("plugins", lambda: plugins.plugins(lambda spec: ""))
        yield here
    else:
        yield from findings("plugins", lambda: plugins.plugins(here.unfit))
        yield from findings("choice", here.choice)
    yield from findings("checkpoint", lambda: model.checkpoint(directory))
    yield from findings("tokenizer", lambda: model.tokenizer(directory))


def look(config: EngineConfig, directory: Path) -> Situation | Finding:
    """The machine and what the model asks of it, or the finding that says why they cannot be known."""
    try:
        from headstock.doctor.situation import situation  # which needs torch

        return situation(config, directory)
    except HeadstockError as error:
        return failed("choice", str(error), "", error.exit_code)
    except (ImportError, OSError) as error:
        return failed("choice", str(error), "")
