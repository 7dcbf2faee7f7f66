"""Find the plugin, list the cases of its kind, and run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from headstock import registry
from headstock.errors import CannotRun, UsageError, join_reasons, shorten
from headstock.spi import DeviceEnv, PluginSpec
from headstock_conformance.case import Case, CheckReport, run_cases
from headstock_conformance.isolation import can_fork, run_in_processes

CHECKED_KINDS: Mapping[str, str] = MappingProxyType(
    {
        kind: f"headstock_conformance.{kind}.checks"
        for kind in (
            "attention",
            "cache",
            "ops",
            "scheduler",
            "runner",
            "model",
            "proposer",
            "logits",
            "tools",
            "grammar",
        )
    }
)
"""Kind -> the module that lists its cases by `list_cases(spec, env, opt=...)`.

If it has `import_first(name)`, that imports the late imports of this plugin's cases.
"""

LIGHT_SECONDS = 60
_IMPORTED_FIRST = ("headstock.startup.device", "headstock.selection.capabilities")


def check_plugin(
    kind: str, name: str, device: str = "auto", *, opt: Sequence[str] = ()
) -> CheckReport:
    """Run all cases of an installed plugin, each in its own process.

    They run in this process if it has used CUDA already.

    device: `cpu`, `cuda`, or `auto` for a GPU if there is one
    opt: options of the plugin, `NAME.FIELD=VALUE` each
    raises: CannotRun when nothing of the plugin can be checked here; UnknownPlugin,
        AmbiguousPlugin, PluginBroken, SpiMismatch, UsageError as when it is chosen
    """

    def list_here() -> tuple[str, Sequence[Case]]:
        env = _describe_device(device)
        return env.device, _list_cases(kind, name, env, opt)

    if kind in CHECKED_KINDS and can_fork():
        # Before the first fork, so that no case need import them.
        for module in _IMPORTED_FIRST:
            import_module(module)
        import_first = getattr(import_module(CHECKED_KINDS[kind]), "import_first", None)
        if import_first is not None:
            import_first(name.rpartition(":")[2])
        label = f"{registry.kind_label(kind)} {name.rpartition(':')[2]!r}"
        used, results = run_in_processes(list_here, label)
    else:
        used, cases = list_here()
        results = run_cases(cases)
    return CheckReport(kind=kind, name=name.rpartition(":")[2], device=used, results=results)


def list_cases(
    kind: str, name: str, device: str = "auto", *, opt: Sequence[str] = ()
) -> tuple[Case, ...]:
    """The cases of an installed plugin, for `pytest.mark.parametrize`.

    They follow from the claims of its spec. `Case.run` raises if the plugin is wrong.

    opt: options of the plugin, `NAME.FIELD=VALUE` each
    raises: as `check_plugin`
    """
    return _list_cases(kind, name, _describe_device(device), opt)


def _describe_device(device: str) -> DeviceEnv:
    # late: it imports torch
    from headstock.startup.device import describe_device

    return describe_device(device)


def _list_cases(kind: str, name: str, env: DeviceEnv, opt: Sequence[str]) -> tuple[Case, ...]:
    if kind not in CHECKED_KINDS:
        raise CannotRun(
            f"there are no cases for plugins of the kind {kind!r}; there are for: "
            f"{', '.join(CHECKED_KINDS)}"
        )
    if not __debug__:
        raise CannotRun("python -O removes the assertions of the checks; run it without -O")
    from headstock.selection.capabilities import find_obstacles

    spec: PluginSpec = registry.load_spec(kind, name)
    obstacles = find_obstacles(spec, env, None)
    if obstacles:
        reasons = join_reasons(
            f"{each.message}; {each.hint}" if each.hint else each.message for each in obstacles
        )
        raise CannotRun(f"{spec.name!r} cannot be checked here: {reasons}")
    plugin = registry.find_plugin(kind, name)
    for assignment in registry.find_unclaimed(opt, [spec]):
        raise UsageError(
            f"--opt {shorten(assignment)}: not an option of the checked plugin; expected "
            f"{spec.name}.FIELD=VALUE"
        )
    registry.make_options(spec, opt)
    listed: tuple[Case, ...] = import_module(CHECKED_KINDS[kind]).list_cases(spec, env, opt=opt)
    return (
        Case("the spec is made without torch", lambda: check_light(plugin.target)),
        Case("the options have defaults", lambda: registry.make_options(spec, ())),
        *listed,
    )


def check_light(target: str) -> None:
    """Check that the spec of an entry point is made without torch, in a separate process."""
    module, _, function = target.partition(":")
    script = (
        f"import sys; from {module} import {function} as spec; spec(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {script}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIGHT_SECONDS,
    )
    assert done.returncode == 0, (
        f"{target} imports torch, and so slows every command; import it in the implementation alone"
        if not done.stderr
        else f"{target} cannot be called alone: {done.stderr.strip().splitlines()[-1]}"
    )
