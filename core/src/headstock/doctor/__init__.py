"""Check what works on this machine; the checks do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.config import EngineConfig
from headstock.doctor.finding import Check, Finding, Status, fail_finding, pass_finding, run_check

if TYPE_CHECKING:
    from headstock.startup.model_loading import FamilyAndConfig

__all__ = ["Finding", "Status", "check_parts", "run_checks"]


def run_checks(config: EngineConfig) -> Iterator[Finding]:
    """Check this machine, the installed plugins and the model of `config`, in that order."""
    # Late, as all imports of checks: what cannot be imported is to be a finding, and not the
    # doctor's end.
    from headstock.doctor import machine_checks, software_checks

    checks: dict[str, Check] = {
        "python": software_checks.check_python,
        "torch": software_checks.check_torch,
        "tools": software_checks.check_tools,
        "memory": machine_checks.check_memory,
        "encoding": machine_checks.check_encoding,
        "hub": machine_checks.check_hub,
    }
    # Yielded one by one: loading plugins takes seconds, and findings are printed as they come.
    for subject, check in checks.items():
        yield from run_check(subject, check)
    yield from check_parts(config)


def check_parts(config: EngineConfig) -> Iterator[Finding]:
    """Check the plugins, the model, and the plugins that `headstock run` would select."""
    from headstock import registry
    from headstock.doctor import plugin_checks

    try:
        from headstock.doctor.environment import inspect_environment  # which needs torch
    # Without torch nothing is known of the device; whether packages are there can still be checked.
    except (ImportError, OSError) as error:
        yield from run_check("plugins", lambda: plugin_checks.check_plugins(registry.find_missing))
        yield fail_finding("choice", str(error), "")
        return
    environment = inspect_environment(config)
    yield from run_check("plugins", lambda: plugin_checks.check_plugins(environment.find_obstacles))
    yield from environment.problems
    if environment.model is not None:
        yield pass_finding("config.json", environment.model.config.architecture)
        yield from run_check("choice", environment.check_selection)
    if environment.directory is not None:
        yield from _check_model_files(
            environment.directory, environment.model, dummy=config.load_format == "dummy"
        )


def _check_model_files(
    directory: Path, model: FamilyAndConfig | None, *, dummy: bool
) -> Iterator[Finding]:
    """Check the files of a model beside its config.json.

    `model` is None when config.json cannot be read.
    """
    from headstock.doctor import model_checks

    if not dummy:
        yield from run_check("weights", lambda: model_checks.check_weights(directory, model))
    yield from run_check("tokenizer", lambda: model_checks.check_tokenizer(directory, model))
    yield from run_check(
        "generation_config.json", lambda: model_checks.check_generation_config(directory)
    )
