"""The models on this machine, and whether each can run here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import evolve, frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.doctor.environment import Environment, inspect_environment
from headstock.doctor.finding import Status
from headstock.doctor.model_checks import check_weights
from headstock.errors import HeadstockError
from headstock.startup.device import free_bytes
from headstock.startup.memory_plan import format_bytes
from headstock.startup.weight_sizes import QUANTS, count_weight_bytes


@frozen(kw_only=True)
class LocalModel:
    """A model on this machine.

    name: what --model takes
    architecture: of config.json; empty where that cannot be read
    size: bytes of the files
    runs: whether it can run here; `how` says with which setting, or why it cannot
    """

    name: str
    directory: str
    architecture: str
    size: int
    runs: bool
    how: str


def list_local_models(config: EngineConfig) -> Iterator[LocalModel]:
    """Each installed checkpoint and each model in the hub's cache, judged with these settings."""
    for plugin in registry.list_installed("checkpoint"):
        yield _judge(plugin.name, config)
    for name in list_cached():
        yield _judge(name, config)


def list_cached() -> list[str]:
    """The ids of models in the hub's cache, by name."""
    # Only here: it costs half a second to import.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model")


def _judge(name: str, config: EngineConfig) -> LocalModel:
    """Judge a model by its config.json and the headers of its files."""
    environment = inspect_environment(evolve(config, model=name, revision=None))
    directory, read = environment.directory, environment.model
    size = 0 if directory is None else sum(map(_size_of, directory.rglob("*")))
    runs, how = _find_verdict(environment)
    return LocalModel(
        name=name,
        directory="" if directory is None else str(directory),
        architecture="" if read is None else read.config.architecture,
        size=size,
        runs=runs,
        how=how,
    )


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _find_verdict(environment: Environment) -> tuple[bool, str]:
    """Whether a model can run, and with which setting, or why it cannot."""
    for problem in environment.problems:
        return False, problem.text
    directory, read = environment.directory, environment.model
    if directory is None or read is None or environment.needs is None:
        return False, "its configuration cannot be read"
    try:
        findings = [*check_weights(directory, read), *environment.check_selection()]
    except HeadstockError as error:
        return False, str(error)
    failed = [each.text for each in findings if each.status is Status.FAIL]
    if failed:
        return False, failed[0]
    return _find_room(environment)


def _find_room(environment: Environment) -> tuple[bool, str]:
    """Whether the weights fit into the memory that is free, and with which --quant."""
    read, config = environment.model, environment.config
    assert read is not None
    free = int(config.memory_ratio * free_bytes(torch.device(environment.env.device)))
    specs = list(read.family.params(read.config).values())
    needed = count_weight_bytes(specs, environment.dtype)
    if needed <= free:
        return True, ""
    # On CPUs alone: elsewhere it depends on options which operations keep such weights.
    if not read.formats and environment.env.device == "cpu":
        for quant, kind in QUANTS.items():
            if count_weight_bytes(specs, environment.dtype, kind) <= free:
                return True, f"--quant {quant}"
    return False, (
        f"its weights need {format_bytes(needed)} in {environment.dtype}, and "
        f"{format_bytes(free)} are free"
    )
