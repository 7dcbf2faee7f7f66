"""Inspect whether what is installed can serve a model on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attrs import frozen

from headstock.config import EngineConfig
from headstock.doctor.finding import Finding, fail_finding, pass_finding, try_step, warn_finding
from headstock.errors import HeadstockError
from headstock.selection.capabilities import find_obstacles
from headstock.selection.model_needs import (
    AttentionNeeds,
    find_attention_needs,
    resolve_model_dtype,
)
from headstock.selection.negotiate import negotiate_terms
from headstock.selection.refusals import check_resolve, make_part_query
from headstock.selection.select import bind_operations, check_plugin_options, select_plugins
from headstock.spi import DeviceEnv, PluginSpec, Rejection
from headstock.startup.device import describe_device
from headstock.startup.model_loading import (
    FamilyAndConfig,
    locate_model,
    read_family,
    resolve_max_seq_len,
)
from headstock.weights import NotDownloaded, find_cached


@frozen(kw_only=True)
class Environment:
    """A machine, and what a model needs of it under a configuration.

    `problems` are findings about why `directory`, `model` or `needs` is None; `dtype` is empty when
    `needs` is None.
    """

    config: EngineConfig
    env: DeviceEnv
    directory: Path | None
    model: FamilyAndConfig | None
    dtype: str
    needs: AttentionNeeds | None
    problems: tuple[Finding, ...]

    def find_obstacles(self, spec: PluginSpec) -> tuple[Rejection, ...]:
        """Why the plugin cannot run here; empty when it can."""
        return find_obstacles(spec, self.env, self.needs)

    def check_selection(self) -> Iterator[Finding]:
        """Check that the selected plugins can serve together.   raises: HeadstockError"""
        if self.needs is None or self.model is None:
            return
        query = make_part_query(self.config, self.needs)
        check_resolve(self.model.spec, "the model family", query, self.env)
        parts = select_plugins(self.config, self.env, self.needs)
        check_plugin_options(self.config, parts, self.model.spec)
        terms = negotiate_terms(self.config, parts, self.model.config, self.dtype, self.env)
        _, operations = bind_operations(parts, self.model.config)
        selection = {
            "attention": parts.attention_name,
            "cache": parts.cache.name,
            "scheduler": parts.scheduler.name,
            "runner": parts.runner.name,
            "ops": parts.ops.name,
            "dtype": terms.dtype,
        }
        if parts.proposer is not None:
            selection["proposer"] = parts.proposer.spec.name
        if parts.processors:
            selection["logits processors"] = ", ".join(each.spec.name for each in parts.processors)
        yield pass_finding(
            "choice", ", ".join(f"{label} {name}" for label, name in selection.items())
        )
        yield pass_finding("operations", "; ".join(operations.lines()))


def inspect_environment(config: EngineConfig) -> Environment:
    """Inspect the environment as far as it can be known; nothing is downloaded."""
    problems: list[Finding] = []
    env = try_step("device", partial(describe_device, config.device), problems)
    directory = model = None
    subject = f"model {config.model}"
    try:
        directory = locate_model(config.model, find_cached, config.revision)
    # A warning, for `headstock run` would download the model.
    except NotDownloaded as error:
        problems.append(warn_finding(subject, str(error), ""))
    except HeadstockError as error:
        problems.append(fail_finding(subject, str(error), "", error.exit_code))
    if directory is not None:
        read = partial(read_family, directory, config.model_family, config.opt, config.model_impl)
        model = try_step("config.json", read, problems)
    dtype_and_needs = None
    if env is not None and model is not None:
        dtype_and_needs = try_step("choice", partial(_find_needs, config, model, env), problems)
    return Environment(
        config=config,
        # With a --device that is not there, the plugins are still compared with what is.
        env=env or describe_device("auto"),
        directory=directory,
        model=model,
        dtype=dtype_and_needs[0] if dtype_and_needs else "",
        needs=dtype_and_needs[1] if dtype_and_needs else None,
        problems=tuple(problems),
    )


def _find_needs(
    config: EngineConfig, model: FamilyAndConfig, env: DeviceEnv
) -> tuple[str, AttentionNeeds]:
    """Find the dtype, and what the model asks of its parts.   raises: HeadstockError"""
    dtype = resolve_model_dtype(config.dtype, model.config, env)
    max_len = resolve_max_seq_len(config, model.config, [])
    return dtype, find_attention_needs(config, model.config, dtype, max_len, model.formats)
