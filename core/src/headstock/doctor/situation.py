"""Whether what is installed can serve a model on this machine: each plugin alone, and those that
would be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock import registry, spi
from headstock.config import EngineConfig
from headstock.doctor.finding import Finding, attempt, failed, passed, warned
from headstock.errors import HeadstockError
from headstock.spi import AttentionSpec, DeviceEnv, ModelConfig
from headstock.startup.build import check_options, find_attention_needs
from headstock.startup.capabilities import AttentionNeeds, resolve_capabilities
from headstock.startup.checkpoint import locate_model, read_model, resolve_max_seq_len
from headstock.startup.device import describe_device
from headstock.startup.negotiate import negotiate_terms, resolve_model_dtype
from headstock.startup.select import select_plugins
from headstock.weights import NotDownloaded, find_cached


@frozen
class Model:
    """A model family, and the configuration that it read."""

    family: spi.Model
    config: ModelConfig


@frozen(kw_only=True)
class Situation:
    """A machine, and what a model asks of it under a configuration.

    `problems` are findings about why `directory`, `model` or `question` is None; `dtype` is empty
    with the last.
    """

    config: EngineConfig
    env: DeviceEnv
    directory: Path | None
    model: Model | None
    dtype: str
    question: AttentionNeeds | None
    problems: tuple[Finding, ...]

    def unfit(self, spec: Any) -> str:
        """Why the plugin cannot serve here, and the next move; empty when it can, or as far as no
        model is needed.
        """
        if isinstance(spec, AttentionSpec) and self.question is not None:
            try:
                resolve_capabilities(
                    spec, self.question.make_query(spec.capabilities.phases), self.env
                )
            except HeadstockError as error:
                return str(error)
            return ""
        reason = registry.elsewhere(spec, self.env)
        return reason and f"{reason}; choose another one here, or auto"

    def choice(self) -> Iterator[Finding]:
        """Whether the parts that are named, `auto` decided, can serve together.

        raises: HeadstockError
        """
        if self.question is None or self.model is None:
            return
        parts = select_plugins(self.config, self.env, self.question)
        check_options(self.config, parts)
        terms = negotiate_terms(self.config, parts, self.model.config, self.dtype, self.env)
        named = {
            "attention": parts.attention_name,
            "cache": parts.cache.name,
            "scheduler": parts.scheduler.name,
            "runner": parts.runner.name,
            "ops": parts.ops.name,
            "dtype": terms.dtype,
        }
        yield passed("choice", ", ".join(f"{what} {which}" for what, which in named.items()))


def look(config: EngineConfig) -> Situation:
    """The situation as far as it can be known; nothing is downloaded."""
    problems: list[Finding] = []
    env = attempt("device", partial(describe_device, config.device), problems)
    directory = model = None
    subject = f"model {config.model}"
    try:
        directory = locate_model(config.model, find_cached, config.revision)
    except NotDownloaded as error:
        problems.append(warned(subject, str(error), ""))
    except HeadstockError as error:
        problems.append(failed(subject, str(error), "", error.exit_code))
    if directory is not None:
        read = attempt("config.json", partial(read_model, directory), problems)
        model = read and Model(*read)
    asked = None
    if env is not None and model is not None:
        asked = attempt("choice", partial(ask, config, model.config, env), problems)
    return Situation(
        config=config,
        env=env or describe_device("auto"),
        directory=directory,
        model=model,
        dtype=asked[0] if asked else "",
        question=asked[1] if asked else None,
        problems=tuple(problems),
    )


def ask(config: EngineConfig, model: ModelConfig, env: DeviceEnv) -> tuple[str, AttentionNeeds]:
    """The dtype, and what the model asks of attention.   raises: HeadstockError"""
    dtype = resolve_model_dtype(config.dtype, model, env)
    return dtype, find_attention_needs(config, model, dtype, resolve_max_seq_len(config, model, []))
