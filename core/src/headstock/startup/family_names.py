"""Choose the family that serves a model's architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstock import registry
from headstock.errors import CannotRun, HeadstockError, ModelError, UnknownPlugin, shorten
from headstock.spi import ModelSpec

_FILE_AT_FAULT = "config.json: "


def choose_family_name(architecture: str, inputs: Sequence[str], implementation: str) -> str | None:
    """The name of the family to use; None where none serves the architecture.

    inputs: what the model takes beside text
    implementation: `EngineConfig.model_impl`
    raises: CannotRun when the family of all decoders is wanted and not installed, or where another
        family serves the text of a model that takes more
    """
    native = _find_served_name(architecture, has_inputs=bool(inputs))
    wanted = implementation == registry.ANY_DECODER
    if implementation == "native" or (native is not None and not wanted):
        return native
    # transformers computes a model with its towers, for which there are no pages.
    if inputs and native is not None:
        raise CannotRun(
            f"model_impl (--model-impl) {implementation}: {shorten(architecture)} takes "
            f"{' and '.join(inputs)} beside text, and transformers computes models of text alone "
            "here; set it to auto, which serves the text by a family"
        )
    if inputs:
        return None
    if registry.ANY_DECODER in {plugin.name for plugin in registry.list_installed("model")}:
        return registry.ANY_DECODER
    if wanted:
        line = registry.install_lines("model")[registry.ANY_DECODER]
        raise CannotRun(
            f"model_impl (--model-impl) {implementation} is not installed; install it with: {line}"
        )
    return None


def _find_served_name(architecture: str, *, has_inputs: bool) -> str | None:
    """The name under which a family serves an architecture; None where none does.

    A model without its head, like published embedding models, has another name.
    has_inputs: whether it takes other inputs beside text
    """
    served = {plugin.name for plugin in registry.list_installed("model")}
    names = registry.list_served_names(architecture, has_inputs=has_inputs)
    return next((name for name in names if name in served), None)


def make_refusal(
    reason: str,
    directory: Path,
    family: str,
    architecture: str,
    implementation: str,
    has_code: bool,
) -> HeadstockError:
    """The error for a model that its family refuses to serve.

    reason: the family's; one that begins with config.json finds fault with the file
    has_code: whether the checkpoint brings Python code
    """
    if reason.startswith(_FILE_AT_FAULT):
        fault = reason.removeprefix(_FILE_AT_FAULT)
        return ModelError(
            f"config.json in {directory}: {fault}; correct it, or choose another model"
        )
    if implementation == registry.ANY_DECODER:
        return CannotRun(
            f"model_impl (--model-impl) {implementation}: {reason}; set it to auto, or choose "
            "another model"
        )
    if family == registry.ANY_DECODER:
        return registry.unknown_architecture_error(architecture, has_code=has_code, reason=reason)
    return ModelError(f"config.json in {directory}: {reason}")


def load_family_spec(architecture: str, provider: str) -> ModelSpec:
    """Load the spec of the family for an architecture.

    provider: its distribution, or "auto" for the only one
    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    picked = architecture if provider == "auto" else f"{provider}:{architecture}"
    try:
        spec: ModelSpec = registry.load_spec("model", picked)
    except UnknownPlugin as error:
        families = registry.list_installed("model")
        providers = [each.distribution for each in families if each.name == architecture]
        raise UnknownPlugin(
            f"model_family (--model-family): expected {' or '.join(providers)} for {architecture}, "
            f"got {shorten(provider)}"
        ) from error
    registry.require_installed(spec)
    return spec
