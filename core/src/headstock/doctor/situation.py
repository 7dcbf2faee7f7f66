"""Whether what is installed can serve a model on this machine: each plugin alone, and those that would be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.doctor.finding import Finding, failed, passed
from headstock.engine.build import check_options, question
from headstock.engine.checkpoint import longest, read_model
from headstock.engine.device import describe
from headstock.engine.negotiate import model_dtype, negotiate
from headstock.engine.resolve import AttentionQuestion, resolve
from headstock.engine.selection import select
from headstock.errors import HeadstockError
from headstock.spi import AttentionSpec, DeviceEnv, ModelConfig


@frozen(kw_only=True)
class Situation:
    """A machine, and what a model asks of it under a configuration."""

    config: EngineConfig
    env: DeviceEnv
    model: ModelConfig
    dtype: str
    question: AttentionQuestion

    def unfit(self, spec: Any) -> str:
        """Why the plugin cannot serve here, and the next move; empty when it can."""
        if isinstance(spec, AttentionSpec):
            try:
                resolve(spec, self.question.query(spec.capabilities.phases), self.env)
            except HeadstockError as error:
                return str(error)
            return ""
        reason = registry.elsewhere(spec, self.env)
        return reason and f"{reason}; choose another one here, or auto"

    def choice(self) -> Iterator[Finding]:
        """Whether the parts that the configuration names, `auto` decided, can serve together."""
        try:
            parts = select(self.config, self.env, self.question)
            check_options(self.config, parts)
            terms = negotiate(self.config, parts, self.model, self.dtype, self.env)
        except HeadstockError as error:
            yield failed("choice", str(error), "", error.exit_code)
            return
        named = {
            "attention": parts.attention_name,
            "cache": parts.cache.name,
            "scheduler": parts.scheduler.name,
            "runner": parts.runner.name,
            "ops": parts.ops.name,
            "dtype": terms.dtype,
        }
        yield passed("choice", ", ".join(f"{what} {which}" for what, which in named.items()))


def situation(config: EngineConfig, directory: Path) -> Situation:
    """The situation with the model in `directory`.   raises: HeadstockError"""
    env = describe(config.device)
    _, model = read_model(directory)
    dtype = model_dtype(config.dtype, model, env)
    asked = question(config, model, dtype, longest(config, model, []))
    return Situation(config=config, env=env, model=model, dtype=dtype, question=asked)
