"""Whether a plugin can run here, and if not, why not.

`select`, the doctor and `headstock plugins inspect` ask this module. Importing it does not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import fields

from headstock import registry
from headstock.errors import (
    CannotRun,
    HeadstockError,
    PluginBroken,
    describe_error,
    join_reasons,
    shorten,
)
from headstock.selection import auto_choices
from headstock.selection.model_needs import AttentionNeeds, describe_shape
from headstock.spi import (
    AttentionCapabilities,
    AttentionQuery,
    AttentionSpec,
    DeviceEnv,
    Feature,
    FullKV,
    GroupQuery,
    LayoutKind,
    Phase,
    PluginSpec,
    Rejection,
)


class BackendRefused(CannotRun):
    """A backend cannot serve a query: the `refusal`, and the reasons that it joins."""

    def __init__(self, refusal: str, reasons: Sequence[Rejection]) -> None:
        hints = tuple(dict.fromkeys(reason.hint for reason in reasons if reason.hint))
        super().__init__(" ".join((f"{refusal}.", *hints)))
        self.refusal = refusal
        self.reasons = tuple(reasons)
        self.hints = hints


def join_refusals(errors: Sequence[HeadstockError]) -> str:
    """Join the refusals of several backends into one text; each hint comes once, at the end."""
    refusals = join_reasons(
        error.refusal if isinstance(error, BackendRefused) else str(error) for error in errors
    )
    hints = dict.fromkeys(
        hint for error in errors if isinstance(error, BackendRefused) for hint in error.hints
    )
    return " ".join((f"{refusals}.", *hints)) if hints else refusals


def resolve_capabilities(
    spec: AttentionSpec, query: AttentionQuery, env: DeviceEnv
) -> AttentionCapabilities:
    """Resolve the backend's capabilities on this machine; they are no wider than declared.

    raises: CannotRun with every reason; PluginBroken when its own `resolve` widens or raises
    """
    capabilities = spec.capabilities
    # The declared capabilities decide first: only a plugin that passes them is imported, so a
    # refusal needs no kernel library. `resolve` can then narrow them by what is installed.
    reasons = [*find_rejections(capabilities, query, env)]
    if not reasons and spec.resolve is not None:
        answer = _call_resolve(spec, spec.resolve, query, env)
        if isinstance(answer, AttentionCapabilities):
            check_narrower(spec, answer)
            capabilities = answer
            reasons = [*find_rejections(capabilities, query, env)]
        else:
            reasons = list(answer)
    if reasons:
        phases = "/".join(sorted(phase.value for phase in query.phases))
        text = "; ".join(reason.message for reason in reasons)
        raise BackendRefused(
            f"attn (--attn) {spec.name} cannot serve {phases} here: {text}", reasons
        )
    return capabilities


def _call_resolve(
    spec: AttentionSpec, path: str, query: AttentionQuery, env: DeviceEnv
) -> AttentionCapabilities | tuple[Rejection, ...]:
    """Call the backend's own `resolve`.

    raises: PluginBroken when it raises, or returns anything but capabilities or rejections
    """
    function = registry.import_object(spec, path)
    try:
        answer = function(query, env)
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{registry.plugin_label(spec)}: its resolve raised "
            f"{describe_error(error)}; report it to its author"
        ) from error
    if isinstance(answer, AttentionCapabilities):
        return answer
    if (
        isinstance(answer, tuple | list)
        and answer
        and all(isinstance(item, Rejection) for item in answer)
    ):
        return tuple(answer)
    raise PluginBroken(
        f"{registry.plugin_label(spec)}: resolve: expected AttentionCapabilities, or a tuple of "
        f"one or more Rejections, got {shorten(answer)}"
    )


_SEE_DOCTOR = "'headstock doctor' with the same flags says what can serve."
_GPU_NOT_FOUND = "Where there is a GPU, 'headstock doctor' says why torch does not find it."


def explain_device_mismatch(spec: PluginSpec, env: DeviceEnv) -> str:
    """Explain why the plugin does not run on this device.

    The text is empty when it does, or when its spec names no devices.
    """
    devices = getattr(getattr(spec, "capabilities", None), "devices", None)
    if devices is None or any(env in device_range for device_range in devices):
        return ""
    return f"it runs on {', '.join(map(str, devices)) or 'no device'}, and this is {env}"


def find_obstacles(
    spec: PluginSpec, env: DeviceEnv, needs: AttentionNeeds | None
) -> tuple[Rejection, ...]:
    """List why the plugin cannot run here; empty when it can.

    Without a model (`needs` is None) attention backends are compared with the device only. The
    device and the model come first: no package helps against either, so missing packages are
    named only when both are served.
    """
    if isinstance(spec, AttentionSpec) and needs is not None:
        # One that serves some KV groups can run beside others.
        phases, found = spec.capabilities.phases, []
        for groups in needs.split_groups():
            try:
                resolve_capabilities(spec, needs.make_query(phases, groups), env)
                break
            except BackendRefused as error:
                found.append(error.reasons)
            except HeadstockError as error:
                return (Rejection(code="broken", message=str(error)),)
        else:
            return found[0] if found else ()
    elif mismatch := explain_device_mismatch(spec, env):
        return (Rejection(code="device", message=f"{mismatch}; choose another one here, or auto"),)
    return registry.find_missing(spec)


def find_rejections(
    capabilities: AttentionCapabilities, query: AttentionQuery, env: DeviceEnv
) -> list[Rejection]:
    """List every reason why these capabilities do not meet the query on this machine."""
    rejections: list[Rejection] = []

    def reject(code: str, message: str, hint: str = "") -> None:
        rejections.append(Rejection(code=code, message=message, hint=hint))

    if not any(env in device_range for device_range in capabilities.devices):
        served = ", ".join(map(str, capabilities.devices))
        hint = (
            _recommend_backend(env)
            if env.device == "cuda"
            else f"{_recommend_backend(env)} {_GPU_NOT_FOUND}"
        )
        reject("device", f"it runs on {served}, and this is {env}", hint)
        return rejections  # no flag would mend any further reason
    lacking = query.phases - capabilities.phases
    if lacking:
        reject(
            "phase",
            f"{_join_values(lacking)} is not supported; supported: "
            f"{_join_values(capabilities.phases)}",
            "Name two backends.",
        )
    for group in query.groups:
        rejections += _find_group_rejections(capabilities, group)
    if len({describe_shape(group) for group in query.groups}) > 1:
        if not capabilities.mixed_groups:
            reject(
                "mixed_groups",
                "KV groups of different layouts or types are not supported",
                _SEE_DOCTOR,
            )
        # Groups that lack the same give the same reason.
        rejections = list(dict.fromkeys(rejections))
    if query.contiguous and not capabilities.contiguous:
        reject(
            "contiguous",
            "contiguous regions are not supported; supported: pages",
            "Set paged_attn (--paged-attn) to on.",
        )
    if not query.contiguous and not capabilities.paged:
        reject(
            "paged",
            "pages are not supported; supported: contiguous regions",
            "Set paged_attn (--paged-attn) to off.",
        )
    if (
        not query.contiguous
        and query.page_size is not None
        and query.page_size not in capabilities.page_sizes
    ):
        reject(
            "page_size",
            f"page size {query.page_size} is not supported; supported: {capabilities.page_sizes}",
            "Change page_size (--page-size).",
        )
    return rejections


def _find_group_rejections(
    capabilities: AttentionCapabilities, group: GroupQuery
) -> list[Rejection]:
    """List every reason why these capabilities do not meet the query of one group."""
    rejections: list[Rejection] = []

    def reject(code: str, message: str, hint: str = _SEE_DOCTOR) -> None:
        rejections.append(Rejection(code=code, message=message, hint=hint))

    if group.layout.kind not in capabilities.layouts:
        reject(
            "layout",
            f"{group.layout.kind.value} KV is not supported; supported: "
            f"{_join_values(capabilities.layouts)}",
        )
    # what comes out goes where q came from
    dtypes = {(q, kv) for q, kv, out in capabilities.dtypes if out == q}
    if (group.q_dtype, group.kv_dtype) not in dtypes:
        accepted = ", ".join(sorted(f"{q} with {kv} KV" for q, kv in dtypes))
        dtype = f"{group.q_dtype} with {group.kv_dtype} KV"
        reject(
            "dtype",
            f"{dtype} is not supported; supported: {accepted}",
            "Set kv_dtype (--kv-dtype) to auto."
            if (group.q_dtype, group.q_dtype) in dtypes
            else "Change dtype (--dtype) or kv_dtype (--kv-dtype).",
        )
    if isinstance(group.layout, FullKV):
        head_dim, ratio = group.layout.k_dim, group.heads // group.layout.kv_heads
        if head_dim not in capabilities.head_dims:
            reject(
                "head_dim",
                f"head_dim {head_dim} is not supported; supported: {capabilities.head_dims}",
            )
        if ratio not in capabilities.gqa_ratios:
            reject(
                "gqa_ratio",
                f"{ratio} query heads per KV head are not supported; supported: "
                f"{capabilities.gqa_ratios}",
            )
    missing = group.features - capabilities.features
    if missing:
        reject("feature", f"the model needs {_join_values(missing)}, which is not supported")
    return rejections


def _join_values(members: Iterable[Phase | Feature | LayoutKind]) -> str:
    """Join the values of phases, features or layouts for an error text."""
    return ", ".join(sorted(member.value for member in members))


def _recommend_backend(env: DeviceEnv) -> str:
    """Recommend an attention backend for this device, in a sentence.

    An installed one comes before one that could be installed.
    """
    names = [
        name
        for served, names in auto_choices.ATTENTION
        if env in served
        for name in reversed(names)
        if "," not in name
    ]
    for name in names:
        try:
            spec = registry.load_spec("attention", name)
        except HeadstockError:
            continue
        if not explain_device_mismatch(spec, env) and not registry.find_missing(spec):
            return f"Set attn (--attn) to {name}."
    installed = {plugin.name for plugin in registry.list_installed("attention")}
    lines = {
        name: line
        for name, line in registry.install_lines("attention").items()
        if name not in installed
    }
    return next(
        (f"Install another one: {lines[name]}." for name in names if name in lines), _SEE_DOCTOR
    )


def check_narrower(spec: AttentionSpec, answer: AttentionCapabilities) -> None:
    """Raise PluginBroken when `resolve` claimed more than the spec declares."""
    # This device is among the declared ones already, and no way of planning is more than another.
    compared = [
        field.name
        for field in fields(AttentionCapabilities)
        if field.name not in ("devices", "planning")
    ]
    for name in compared:
        if not getattr(answer, name) <= getattr(spec.capabilities, name):
            raise PluginBroken(
                f"attention plugin {spec.name!r}: its resolve claims more {name} than its spec "
                "declares"
            )
