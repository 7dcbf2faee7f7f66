"""Choose the family that serves a model's architecture."""

from __future__ import annotations

from collections.abc import Sequence

from headstock import registry
from headstock.errors import CannotRun, UnknownPlugin, shorten
from headstock.spi import ModelSpec


def choose_family_name(architecture: str, inputs: Sequence[str], implementation: str) -> str | None:
    """The name of the family to use; None where none serves the architecture.

    inputs: what the model takes beside text
    implementation: `EngineConfig.model_impl`
    raises: CannotRun when the family of all decoders is wanted and not installed
    """
    native = _find_served_name(architecture, has_inputs=bool(inputs))
    wanted = implementation == registry.ANY_DECODER
    if implementation == "native" or (native is not None and not wanted):
        return native
    # transformers computes a model with its towers, for which there are no pages.
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
