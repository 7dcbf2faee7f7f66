"""Which plugins an engine is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, HeadstockError, PluginBroken, SpiMismatch, UsageError
from headstock.logs import log_event
from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    CacheSpec,
    DeviceEnv,
    ExecutorSpec,
    GraphSupport,
    Ops,
    OpsSpec,
    Phase,
    RunnerSpec,
    SchedulerSpec,
)
from headstock.startup import defaults as auto
from headstock.startup.capabilities import AttentionQuestion, join_refusals, resolve

T = TypeVar("T")

LOG = logging.getLogger(__name__)


@frozen(kw_only=True)
class Choice:
    """An attention backend for the phases it serves, with its capabilities on this machine."""

    spec: AttentionSpec
    phases: frozenset[Phase]
    capabilities: AttentionCapabilities


@frozen(kw_only=True)
class Parts:
    """The plugins of an engine.

    `attention` has one entry when one backend serves all phases, else prefill and decode;
    `operations` are those of `ops`.
    """

    attention: tuple[Choice, ...]
    cache: CacheSpec
    scheduler: SchedulerSpec
    runner: RunnerSpec
    ops: OpsSpec
    operations: Ops
    executor: ExecutorSpec

    @property
    def attention_name(self) -> str:
        """The backends as `--attn` names them."""
        return ",".join(choice.spec.name for choice in self.attention)


def select(config: EngineConfig, env: DeviceEnv, question: AttentionQuestion) -> Parts:
    """The plugins that `config` names, `auto` decided; each can run here.

    raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun with the reasons
    """
    if config.tp > 1:
        raise CannotRun(f"--tp {config.tp}: this version runs on one device; use --tp 1")
    attention = attention_for(config.attn, env, question, config.spell)
    decode = attention[-1].capabilities

    def runner(name: str) -> RunnerSpec:
        found: RunnerSpec = ready("runner", name, env)
        if not any(env in served for served in found.capabilities.devices):
            raise CannotRun(f"--runner {name} cannot run on {env}; use --runner eager")
        if question.contiguous and replays(found):
            raise CannotRun(
                f"--runner {name} replays graphs, and --paged-attn off runs without; use --runner "
                "eager"
            )
        if config.cuda_graph_max_bs == 0 and replays(found):
            raise CannotRun(
                f"--runner {name} replays graphs, and --cuda-graph-max-bs 0 turns graphs off"
            )
        if decode.graph < found.capabilities.needs_graph:
            raise CannotRun(
                f"--runner {name} needs graph support {found.capabilities.needs_graph.name} of "
                f"the decode backend, and {attention[-1].spec.name!r} has {decode.graph.name}; "
                "use --runner eager"
            )
        return found

    def ops(name: str) -> tuple[OpsSpec, Ops]:
        found: OpsSpec = ready("ops", name, env)
        if not any(env in served for served in found.capabilities.devices):
            raise CannotRun(f"--ops {name} cannot run on {env}; use --ops torch")
        if question.dtype not in found.capabilities.dtypes:
            raise CannotRun(
                f"--ops {name} does not serve {question.dtype}; use --ops torch or another --dtype"
            )
        options = () if found.options is None else (registry.options(found, config.opt),)
        return found, registry.made(found, Ops, *options)

    ops_spec, operations = first(config.ops, auto.OPS, ops, "--ops", config.spell)
    return Parts(
        attention=attention,
        cache=ready("cache", config.cache_type, env),
        scheduler=ready("scheduler", config.scheduler, env),
        runner=first(runner_name(config, env), auto.RUNNERS, runner, "--runner", config.spell),
        ops=ops_spec,
        operations=operations,
        executor=ready("executor", config.executor, env),
    )


def replays(spec: RunnerSpec) -> bool:
    """Whether the runner needs graphs."""
    return spec.capabilities.needs_graph > GraphSupport.NEVER


def runner_name(config: EngineConfig, env: DeviceEnv) -> str:
    """The runner that the configuration names; `auto`, and a log line, when it wants graphs that
    cannot be had.

    Graphs cannot be had in contiguous mode, and on a CPU. There a preset may want them; a runner
    that is named and does not serve the device is left for `select` to refuse.
    """
    spec = None if config.runner == "auto" else registry.spec("runner", config.runner)
    if spec is not None and not any(env in devices for devices in spec.capabilities.devices):
        return config.runner
    named = spec is not None and replays(spec)
    flag = (
        f"--runner {config.runner}" if named else f"--cuda-graph-max-bs {config.cuda_graph_max_bs}"
    )
    if config.paged_attn == "off" and (named or (config.cuda_graph_max_bs and env.device != "cpu")):
        LOG.warning(
            log_event(
                "no graphs in contiguous mode",
                because=config.spell("--paged-attn off"),
                ignored=config.spell(flag),
            )
        )
        return "auto"
    several = (config.cuda_graph_max_bs or 0) > 1  # a chat sets 1 by itself
    if env.device == "cpu" and not named and several:
        LOG.info(
            log_event(
                "no graphs on a CPU",
                because=config.spell(f"--device {config.device}"),
                ignored=config.spell(flag),
            )
        )
    return config.runner


def ready(kind: str, name: str, env: DeviceEnv) -> Any:
    """The plugin's spec, what it requires being installed. A plugin that does not run on this
    device is not asked for
    that: nothing that could be installed would help, and its caller says why.
    """
    spec = registry.spec(kind, name)
    if not registry.elsewhere(spec, env):
        registry.require(spec)
    return spec


def first(
    asked: str,
    names: Sequence[str],
    make: Callable[[str], T],
    flag: str,
    spell: Callable[[str], str] = str,
) -> T:
    """What `make` gives for the name asked for, or for the first of `names` that it does not
    refuse.

    `spell` puts flags in logs into the words of whoever configured the engine.
    """
    if asked != "auto":
        return make(asked)
    refusals = []
    for name in names:
        try:
            return make(name)
        except HeadstockError as error:
            refusals.append(error)
            level = (
                logging.WARNING if isinstance(error, PluginBroken | SpiMismatch) else logging.DEBUG
            )
            LOG.log(
                level,
                log_event(
                    "auto rejected", setting=spell(flag), candidate=name, reason=spell(str(error))
                ),
            )
    raise CannotRun(f"{flag} auto: nothing can run here: {join_refusals(refusals)}")


def attention_for(
    asked: str, env: DeviceEnv, question: AttentionQuestion, spell: Callable[[str], str] = str
) -> tuple[Choice, ...]:
    """The attention backends for `--attn`, each narrowed to this machine."""
    names = next((names for served, names in auto.ATTENTION if env in served), ())
    choices = first(asked, names, lambda pair: backends(pair, env, question), "--attn", spell)
    if asked == "auto" and len(names) > 1 and choices[0].spec.name == names[-1]:
        see = "headstock doctor, with the same flags"
        facts = {"setting": spell("--attn"), "chosen": names[-1], "device": str(env), "see": see}
        LOG.warning(log_event("auto is left with its last choice", **facts))
    return choices


def backends(pair: str, env: DeviceEnv, question: AttentionQuestion) -> tuple[Choice, ...]:
    """One backend for every phase, or one for prompts and one for decoding.

    raises: UsageError, CannotRun
    """
    names = pair.split(",")
    if len(names) > 2:
        raise UsageError(
            f"--attn {pair}: wanted one backend, or two as PREFILL,DECODE; got {len(names)}"
        )
    prompts, decode = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE})
    wanted = (
        {names[0]: prompts | decode}
        if len(set(names)) == 1
        else dict(zip(names, (prompts, decode), strict=True))
    )
    choices, refusals = [], []
    for name, phases in wanted.items():
        try:
            spec: AttentionSpec = ready("attention", name, env)
            choices.append(
                Choice(
                    spec=spec,
                    phases=phases,
                    capabilities=resolve(spec, question.query(phases), env),
                )
            )
        except CannotRun as error:
            refusals.append(error)
    if len(refusals) > 1:
        raise CannotRun(join_refusals(refusals))
    if refusals:
        raise refusals[0]
    return tuple(choices)
