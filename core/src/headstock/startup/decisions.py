"""Decide what serves a configuration, before its weights load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import UsageError
from headstock.ops.bound import OperationTable
from headstock.selection.model_needs import (
    AttentionNeeds,
    find_attention_needs,
    resolve_kv_dtype,
    resolve_model_dtype,
)
from headstock.selection.negotiate import Terms, negotiate_terms
from headstock.selection.proposers import find_own_proposer
from headstock.selection.refusals import check_resolve, make_part_query
from headstock.selection.request_args import RequestArgs, collect_request_args
from headstock.selection.select import (
    SelectedPlugins,
    bind_operations,
    check_plugin_options,
    select_plugins,
)
from headstock.spi import (
    DeviceEnv,
    ModelConfig,
    Ops,
    ParamSpec,
    Ranks,
    Shard,
    WeightFormat,
)
from headstock.startup.device import describe_device, name_device_kind
from headstock.startup.model_loading import (
    FamilyAndConfig,
    locate_model,
    read_family,
    replace_missing_head,
    resolve_max_seq_len,
    shard_model,
    untie_embeddings,
)
from headstock.startup.ranks import check_same
from headstock.startup.start_times import StartTimes
from headstock.startup.tuned_choices import TunedChoices, find_tuned_choices
from headstock.startup.weight_notes import (
    check_quant,
    check_quantized,
    describe_left_out,
    describe_weights,
    scale_kv,
)
from headstock.startup.weight_sizes import offer_int8


@frozen(kw_only=True)
class ChosenModel:
    """What is to be served.

    model: the configuration, as the checkpoint's weights have it
    no_text: why the model gives vectors alone; empty where it gives text
    notes: lines for the user
    """

    directory: Path
    read: FamilyAndConfig
    model: ModelConfig
    no_text: str
    notes: tuple[str, ...]


def _choose_model(config: EngineConfig) -> ChosenModel:
    """Choose the model and its family, without its weights.   raises: as `build_engine`"""
    directory = locate_model(config.model, revision=config.revision)
    read = read_family(
        directory,
        config.model_family,
        config.opt,
        config.model_impl,
        drafted_by=find_own_proposer(config),
    )
    model, no_text, notes = read.config, "", list[str]()
    if config.load_format != "dummy":
        model = untie_embeddings(directory, read.family, model)
        model, no_text = replace_missing_head(directory, read.family, model)
        notes = describe_left_out(directory, read.family, model)
    if no_text:
        notes.append(f"vectors are served, and no text: {no_text}")
    if read.spec.name == registry.ANY_DECODER:
        asked = config.model_impl == registry.ANY_DECODER
        why = "as model_impl (--model-impl) says" if asked else "since no family serves it"
        notes.insert(
            0,
            f"transformers computes {model.architecture}, {why}: on one device and with few fused "
            "operations, so steps are slower than a family's",
        )
    return ChosenModel(
        directory=directory,
        read=read,
        model=model,
        no_text=no_text,
        notes=tuple(notes),
    )


def describe_graph_obstacle(model: ModelConfig, env: DeviceEnv) -> str:
    """Say why steps of the model are not replayed; empty where they may be, and on a CPU."""
    if model.is_capturable or env.device == "cpu":
        return ""
    obstacle = model.capture_obstacle or f"the family of {model.architecture} does not allow it"
    return f"steps are not replayed as graphs: {obstacle}"


def _take_graph_tokens(
    config: EngineConfig, parts: SelectedPlugins, tuned: TunedChoices | None
) -> tuple[EngineConfig, str]:
    """The configuration with the largest size that was measured to be worth a graph, and a note.

    A size that the user gives stays; the note is empty then.
    """
    if tuned is None or config.cuda_graph_max_tokens is not None:
        return config, ""
    names = (parts.attention_name, parts.ops.name, parts.runner.name)
    most = tuned.fastest.find_graph_tokens(*names)
    if most is None:
        return config, ""
    note = (
        f"cuda_graph_max_tokens (--cuda-graph-max-tokens) {most}: 'headstock tune' measured on "
        f"{tuned.date} that larger steps with prompts are faster without a graph"
    )
    return attrs.evolve(config, cuda_graph_max_tokens=most), note


@frozen(kw_only=True, eq=False)
class DecidedParts:
    """What serves a configuration, decided before the weights load.

    config: as given, with the sizes that were measured for its graphs
    part: the part of the chosen model that this rank computes
    max_len: tokens of a request at most, by the model and the configuration
    weights: as in `EngineBuild`
    notes: lines for the user; graph_note is one if there are graphs
    """

    config: EngineConfig
    env: DeviceEnv
    chosen: ChosenModel
    part: ModelConfig
    dtype: str
    max_len: int
    needs: AttentionNeeds
    parts: SelectedPlugins
    operations: OperationTable
    request_args: RequestArgs
    terms: Terms
    weights: str
    notes: Sequence[str]
    graph_note: str

    def name_choices(self) -> dict[str, Any]:
        """Name what was chosen, as settings for the other ranks, which choose nothing."""
        parts, config = self.parts, self.config
        return {
            "attn": parts.attention_name if config.attn == "auto" else config.attn,
            "ops": parts.ops.name if config.ops == "auto" else config.ops,
            "runner": parts.runner.name if config.runner == "auto" else config.runner,
            "cuda_graph_max_tokens": config.cuda_graph_max_tokens,
            "opt": [*parts.tuned_options, *config.opt],
            "tuned_choices": None,
            "memory_profiles": None,
            "grammar": "off",
            "debug_canary": False,
            "record": None,
        }

    def describe(self) -> dict[str, str]:
        """Describe what all ranks must have decided alike, by what it is about."""
        names = sorted(self.env.distributions)
        versions = [f"{name} {self.env.distributions[name]}" for name in names]
        return {
            # The same operation has the same bits on the same kind of device alone.
            "device": name_device_kind(self.env),
            "torch": str(self.env.torch),
            "versions": ", ".join(each for each in versions if each.startswith("headstock")),
            # Rank 0 alone follows grammars.
            "parts": ", ".join(
                f"{spec.name} ({spec.implementation})"
                for spec in self.parts.specs
                if spec is not self.parts.grammar
            ),
            "operations": "; ".join(self.operations.lines()),
            # Ranks may have other numbers of threads, which the table shows.
            "terms": repr(attrs.evolve(self.terms, table=())),
            "dtype": self.dtype,
            "max_seq_len": str(self.max_len),
            "weights": self.weights,
        }


def decide_parts(ranks: Ranks, config: EngineConfig, times: StartTimes) -> DecidedParts:
    """Decide as rank 0 does, whose choices hold for all ranks.

    raises: as `build_engine`
    writes: times, a part for which another rank waits for rank 0
    """
    if ranks.count == 1:
        return _decide_alone(config, ranks)
    if ranks.index:
        # The settings have tuples, which JSON lacks.
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in ranks.share(None).items()
        }
        times.end_part("waiting")
        decided = _decide_alone(EngineConfig(**values), ranks)
    else:
        decided = _decide_alone(config, ranks)
        ranks.share(attrs.asdict(config, recurse=False) | decided.name_choices())
    check_same(ranks, decided.describe())
    return decided


def _check_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise UsageError when experts are to be cut of a model without any."""
    if config.ep and not any(layer.experts for layer in model.layers):
        raise UsageError(
            f"ep (--ep) on: {model.architecture} has no experts to give to ranks; leave it out"
        )


def _takes_any(operations: Ops, specs: Sequence[ParamSpec], format: WeightFormat) -> bool:
    """Whether the operations take one of the parameters in that format."""
    return any(operations.takes_format(spec, format) for spec in specs)


def _decide_alone(config: EngineConfig, ranks: Ranks) -> DecidedParts:
    """Decide what serves the configuration, or refuse it.   raises: as `build_engine`"""
    # Model, options, parts and terms are checked in the order in which each needs the one before.
    env = describe_device(config.device)
    chosen = _choose_model(config)
    read, notes = chosen.read, list(chosen.notes)
    dtype = resolve_model_dtype(config.dtype, chosen.model, env)
    kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype)
    model, kv_note = scale_kv(config, chosen.directory, read.family, chosen.model, kv_dtype)
    notes += [kv_note] if kv_note else []
    if ranks.count > 1:
        _check_experts(config, model)
        shard = Shard(index=ranks.index, count=ranks.count, by_expert=config.ep)
        model = shard_model(read.family, model, shard)
    elif config.ep:
        notes.append("ep (--ep) changes nothing: with tp (--tp) 1 there is nothing to cut")
    max_len = resolve_max_seq_len(config, model, notes)
    check_quant(config, chosen.directory, read.formats)
    needs = find_attention_needs(config, model, dtype, max_len, read.formats)
    check_resolve(read.spec, "the model family", make_part_query(config, needs), env)
    tuned, tuned_note = find_tuned_choices(config, env, chosen.directory, needs)
    parts = select_plugins(config, env, needs, None if tuned is None else tuned.fastest)
    notes += [tuned_note] if tuned_note else []
    graph_obstacle = describe_graph_obstacle(model, env)
    notes += [graph_obstacle] if graph_obstacle else []
    config, graph_note = _take_graph_tokens(config, parts, tuned)
    check_plugin_options(config, parts, read.spec)
    request_args = collect_request_args(parts.specs)
    terms = negotiate_terms(config, parts, model, dtype, env)
    parts, operations = bind_operations(parts, model)
    specs = list(read.family.params(model).values())
    check_quantized(config, read.formats, parts.ops.name, specs, parts.operations.takes_format)
    if env.device == "cpu" and config.quant == "off" and not read.formats:
        offer = offer_int8(specs, dtype, parts.operations.takes_format)
        notes += [offer] if offer else []
    return DecidedParts(
        config=config,
        env=env,
        chosen=chosen,
        part=model,
        dtype=dtype,
        max_len=max_len,
        needs=needs,
        parts=parts,
        operations=operations,
        request_args=request_args,
        terms=terms,
        weights=describe_weights(
            config,
            chosen.directory,
            dtype,
            parts.ops.name,
            partial(_takes_any, parts.operations, specs),
        ),
        notes=notes,
        graph_note=graph_note,
    )
