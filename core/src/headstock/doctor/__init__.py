"""What works on this machine, found out by checks that do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator

from headstock.doctor.finding import Check, Finding, Status, failed, findings
from headstock.errors import HeadstockError

__all__ = ["Finding", "Status", "examine"]


def examine(model: str) -> Iterator[Finding]:
    """All findings about this machine, the installed plugins and the checkpoint `model`, in the order of the checks."""
    from headstock.doctor import machine, plugins, software

    checks: dict[str, Check] = {
        "python": software.python,
        "torch": software.torch,
        "tools": software.tools,
        "memory": machine.memory,
        "encoding": machine.encoding,
        "hub": machine.hub,
        "plugins": plugins.plugins,
    }
    for subject, check in checks.items():
        yield from findings(subject, check)
    yield from examine_model(model)


def examine_model(name: str) -> Iterator[Finding]:
    """All findings about a checkpoint."""
    from headstock.doctor import model

    try:
        directory = model.directory_of(name)
    except HeadstockError as error:
        yield failed(f"model {name}", str(error), "")
        return
    yield from findings("checkpoint", lambda: model.checkpoint(directory))
    yield from findings("tokenizer", lambda: model.tokenizer(directory))
