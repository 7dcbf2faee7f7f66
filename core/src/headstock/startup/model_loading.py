"""Locate, read and load the model that an engine serves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from attrs import frozen

from headstock import registry, weights
from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.errors import (
    CannotRun,
    ModelError,
    PluginBroken,
    UsageError,
    describe_type,
    format_count,
    shorten,
    suggest_name,
)
from headstock.logs import log_event
from headstock.spi import (
    Model,
    ModelConfig,
    ModelSpec,
    Ops,
    Params,
    ParamSpec,
    Shard,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock.startup.blame import PluginNames, blame_plugins
from headstock.startup.family_names import choose_family_name, load_family_spec, make_refusal
from headstock.startup.kv_groups import check_kv_groups
from headstock.startup.memory_plan import format_bytes
from headstock.startup.weight_sizes import suggest_quant

LOG = logging.getLogger(__name__)

_CODE_FIELD = "auto_map"
"""The field of config.json by which transformers imports Python files of the directory."""
_TOWERS = {
    "images": ("vision_config", "vision_tower", "mm_vision_tower", "visual", "img_processor"),
    "sound": ("audio_config", "audio_tower", "audio_processor", "speech_config"),
}
"""What a model takes beside text -> the fields of config.json that describe the part for it."""
_MAX_FIELDS_SHOWN = 8
"""How many fields a warning lists before it only counts the rest."""


def locate_model(
    name: str,
    fetch: Callable[[str, str | None], Path] = weights.download_model,
    revision: str | None = None,
) -> Path:
    """Locate the directory of a model.

    It is that of an installed checkpoint, the named directory, or what `fetch` returns for a name
    on the hub. `fetch` gets the name and the revision, which only a model on the hub has.

    raises: ModelError, UsageError for the revision of another model
    """
    fetched: list[str] = []

    def fetch_revision(repository: str) -> Path:
        """The copy of a repository, at the revision."""
        fetched.append(repository)
        return fetch(repository, revision)

    directory = _find_model_directory(name, fetch_revision)
    if revision is not None and not fetched:
        raise UsageError(
            f"revision (--revision) {shorten(revision)}: {shorten(name)} is installed here, and "
            "only models on the hub have revisions; leave the revision out, or give model "
            "(--model) owner/name"
        )
    return directory


def _find_model_directory(name: str, fetch: Callable[[str], Path]) -> Path:
    """Find the directory of an installed checkpoint, the named one, or what `fetch` returns.

    raises: ModelError, PluginBroken
    """
    names = [plugin.name for plugin in registry.list_installed("checkpoint")]
    if name in names:
        directory: object = registry.load_spec("checkpoint", name).directory
        if not isinstance(directory, str) or not Path(directory).is_dir():
            plugin = registry.find_plugin("checkpoint", name)
            raise PluginBroken(
                f"{plugin} names the directory {shorten(directory, 120)}, which is not there; "
                "report it to its author or install it again"
            )
        return Path(directory)
    path = Path(os.path.expanduser(name))
    source = registry.install_lines("checkpoint").get(name)
    if source and not path.exists():
        raise ModelError(f"the model {name!r} is not installed; install it with: {source}")
    # A slip in a checkpoint's name must not end as "no such directory", or as a call of the hub.
    close = suggest_name(name, names)
    if close and "/" not in name and not path.exists():
        raise ModelError(f"no model {shorten(name)}{close}")
    return weights.resolve_directory(name, fetch)


@frozen(kw_only=True, eq=False)
class FamilyAndConfig:
    """A model family with its spec, and the configuration that it read.

    formats: how the checkpoint packs matrices; none for plain ones
    """

    spec: ModelSpec
    family: Model
    config: ModelConfig
    formats: tuple[WeightFormat, ...]


def read_model(directory: Path) -> tuple[Model, ModelConfig]:
    """Read the configuration of a model directory with the family that serves it.

    raises: as `read_family`
    """
    read = read_family(directory)
    return read.family, read.config


def read_family(
    directory: Path,
    provider: str = "auto",
    opt: Sequence[str] = (),
    implementation: str = "auto",
    drafted_by: str = "",
) -> FamilyAndConfig:
    """Read the configuration of a model directory with the family that serves it.

    provider: the distribution of the family, where several have one for the architecture
    opt: the assignments to options of plugins
    implementation: `EngineConfig.model_impl`
    drafted_by: the proposer whose drafts the model's own layers make; empty without one

    raises: ModelError; UnknownPlugin, AmbiguousPlugin; CannotRun when no installed family serves
        the architecture; PluginBroken when the family's KV groups contradict its layers
    """
    hf = weights.read_config(directory)
    architectures = hf.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not isinstance(architectures[0], str)
    ):
        raise ModelError(
            f"config.json in {directory}: architectures: expected a list such as "
            f"['Qwen3ForCausalLM'], got {shorten(architectures)}"
        )
    # Files are data only. A family that serves the architecture needs no code of the checkpoint's,
    # which published ones bring for versions of transformers that had no such family yet.
    has_code = hf.pop(_CODE_FIELD, None) is not None
    inputs = _list_other_inputs(hf)
    architecture = choose_family_name(architectures[0], inputs, implementation)
    if architecture is None:
        raise registry.unknown_architecture_error(
            architectures[0], has_code=has_code, inputs=inputs
        )
    if has_code:
        LOG.info(log_event("Python code of the checkpoint is not run", field=_CODE_FIELD))
    reader = weights.read_quantization(directory)
    spec = load_family_spec(architecture, provider)
    family = registry.make_family(spec, opt)
    # How weights are stored is the reader's matter: families never see it.
    plain = weights.drop_quantization(hf)
    with blame_plugins(PluginNames(frozenset({("model", spec.name)}))):
        try:
            model = family.config(plain)
        except ValueError as error:
            raise make_refusal(
                str(error), directory, spec.name, architectures[0], implementation, has_code
            ) from error
    if drafted_by and isinstance(model, ModelConfig):
        model = _add_draft_layers(family, plain, model, drafted_by)
    if not isinstance(model, ModelConfig):
        raise PluginBroken(
            f"the model family {spec.name!r}: config: expected a ModelConfig, got "
            f"{describe_type(model)}; report it to its author"
        )
    check_kv_groups(spec, model)
    ignored = [
        *model.ignored_fields,
        *(
            f"{weights.QUANTIZATION_FIELDS[0]}.{name}"
            for name in (reader.ignored_fields if reader else ())
        ),
    ]
    if ignored:
        fields = ", ".join(map(shorten, ignored[:_MAX_FIELDS_SHOWN]))
        more = (
            {"more": len(ignored) - _MAX_FIELDS_SHOWN} if len(ignored) > _MAX_FIELDS_SHOWN else {}
        )
        LOG.warning(
            log_event(
                f"{architectures[0]} does not read all of config.json", ignored=fields, **more
            )
        )
    return FamilyAndConfig(
        spec=spec, family=family, config=model, formats=reader.formats if reader else ()
    )


def _add_draft_layers(
    family: Model, hf: Mapping[str, object], model: ModelConfig, proposer: str
) -> ModelConfig:
    """The configuration with the layers that guess further tokens.   raises: CannotRun"""
    reason = "its family computes no layers that guess further tokens"
    if family.draft_config is not None:
        try:
            return family.draft_config(hf, model)
        except ValueError as error:
            reason = shorten(error, 400)
    raise CannotRun(
        f"proposer (--proposer) {proposer} takes drafts from {model.architecture}, and {reason}; "
        "set it to ngram or off"
    )


def _list_other_inputs(hf: Mapping[str, object]) -> list[str]:
    """What the model of a config.json takes beside text, by the settings of its towers."""
    return [
        inputs
        for inputs, fields in _TOWERS.items()
        if any(isinstance(hf.get(name), (Mapping, str)) for name in fields)
    ]


def untie_embeddings(directory: Path, family: Model, model: ModelConfig) -> ModelConfig:
    """Give the model a separate output matrix if the checkpoint stores a different one.

    raises: ModelError when a file does not match its header
    """
    # transformers compares the two and ties them only where they are equal. By config.json alone, a
    # stored matrix that differs would be lost in silence.
    differing = (
        weights.find_differing_copies(directory, family.params(model))
        if model.tied_embeddings
        else ()
    )
    if not differing:
        return model
    because = (
        "it is stored and differs from the embeddings, though config.json has tie_word_embeddings"
    )
    LOG.warning(
        log_event("an output matrix of its own is used", tensor=differing[0], because=because)
    )
    return attrs.evolve(model, tied_embeddings=False)


def replace_missing_head(
    directory: Path, family: Model, model: ModelConfig
) -> tuple[ModelConfig, str]:
    """Give a model whose checkpoint leaves its output matrix out the embeddings in its place.

    returns: the model, and why it gives vectors alone; empty where it has an output matrix
    raises: ModelError when a file does not match its header
    """
    missing = weights.find_missing_heads(directory, family.params(model))
    if not missing:
        return model, ""
    # Steps are measured and captured with it; no request may sample by it.
    return attrs.evolve(model, tied_embeddings=True), (
        f"the checkpoint has no output matrix ({shorten(missing[0])}), and tie_word_embeddings in "
        "config.json does not put the embeddings in its place"
    )


def shard_model(family: Model, model: ModelConfig, shard: Shard) -> ModelConfig:
    """The part of the model that one rank computes.

    raises: CannotRun when the model cannot be cut so
    """
    if family.shard is None:
        raise CannotRun(f"{model.architecture} cannot be cut into shards; use one device")
    try:
        return family.shard(model, shard)
    except ValueError as error:
        raise CannotRun(
            f"{model.architecture} cannot be cut into {format_count(shard.count, 'shard')}: {error}"
        ) from error


def resolve_max_seq_len(config: EngineConfig, model: ModelConfig, notes: list[str]) -> int:
    """Resolve the longest sequence that the configuration and the model allow.

    A cut that the configuration permits is noted.

    writes: notes
    raises: UsageError when the configuration wants more than the model allows
    """
    if config.max_seq_len is None:
        return model.max_position
    if config.max_seq_len > model.max_position:
        if not config.max_seq_len_or_less:
            # The keys that are stored would be of another rope.
            is_dynamic = any(rope.scaling == "dynamic" for rope in model.ropes)
            why = ", as rope_type 'dynamic' turns every token anew beyond it" if is_dynamic else ""
            raise UsageError(
                f"max_seq_len (--max-seq-len) {config.max_seq_len}: the model's own limit is "
                f"{format_count(model.max_position, 'token')}{why}; lower it, leave it out, or "
                "have it cut by max_seq_len_or_less (--max-seq-len-or-less)"
            )
        notes.append(
            f"max_seq_len (--max-seq-len) {config.max_seq_len} is cut to {model.max_position}, "
            "the model's own limit"
        )
    return min(config.max_seq_len, model.max_position)


def check_parameters(read: FamilyAndConfig, params: Params, model: ModelConfig) -> None:
    """Have the family look at the loaded parameters.

    raises: CannotRun when it would serve the model wrong
    """
    if read.family.check is None:
        return
    try:
        read.family.check(params, model)
    except ValueError as error:
        raise CannotRun(f"the model family {read.spec.name!r}: {error}") from error


def load_onto_device(
    config: EngineConfig,
    directory: Path,
    family: Model,
    model: ModelConfig,
    whole: ModelConfig,
    dtype: str,
    quant: WeightKind | None,
    formats: Sequence[WeightFormat],
    device: torch.device,
    max_len: int,
    operations: Ops,
    prepare: Callable[[ParamSpec, Weight], Weight],
    free: int,
    on_progress: ProgressCallback | None,
) -> Params:
    """Load the model's parameters onto the device.

    whole: the whole model, where `model` is a shard of it
    formats: how the checkpoint packs matrices
    prepare: that of the operations, perhaps watched
    raises: ModelError; CannotRun when they do not fit into `free` bytes
    """
    too_large = ""

    def check_size(needed: int) -> None:
        """Raise CannotRun for more bytes than are free."""
        nonlocal too_large
        specs = () if quant or formats else family.params(model).values()
        fitting = suggest_quant(specs, dtype, operations.takes_format, free) if specs else ""
        moves = [f"set quant (--quant) to {fitting}"] if fitting else []
        moves += ["use a smaller dtype (--dtype)", "another device (--device)"]
        too_large = (
            f"the weights need {format_bytes(needed)} in {dtype}, and {format_bytes(free)} are "
            f"free on {device}; {', '.join(moves)}, or end what else uses the memory"
        )
        if needed > free:
            raise CannotRun(too_large)

    try:
        return weights.load_weights(
            directory,
            family.params(model),
            model,
            dtype=getattr(torch, dtype),
            device=device,
            max_seq_len=max_len,
            dummy=config.load_format == "dummy",
            on_progress=on_progress,
            prepare=prepare,
            takes_format=operations.takes_format,
            quant=quant,
            # Before a byte is read; on a CPU the kernel would end the process instead of raising.
            check_size=check_size,
            whole=family.params(whole),
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CannotRun(too_large) from error
