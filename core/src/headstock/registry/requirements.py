"""Whether what a plugin needs is installed, found out without importing any of it."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

from headstock.errors import CannotRun
from headstock.registry.loading import origin
from headstock.spi import DeviceEnv, PluginSpec, Rejection, Require


def missing(spec: PluginSpec) -> tuple[Rejection, ...]:
    """One rejection for each requirement that is not met; empty when all are."""
    return tuple(each for each in map(unmet, spec.requires) if each is not None)


def require(spec: PluginSpec) -> None:
    """Raise CannotRun, with what to install, unless every requirement of the spec is met."""
    reasons = missing(spec)
    if reasons:
        said = "; ".join(
            f"{each.message}{f', install with: {each.hint}' if each.hint else ''}"
            for each in reasons
        )
        raise CannotRun(f"{origin(spec)} cannot run here: {said}")


def elsewhere(spec: PluginSpec, env: DeviceEnv) -> str:
    """Why a plugin that names the devices it runs on does not run on this one; empty when it does,
    or names none.
    """
    devices = getattr(getattr(spec, "capabilities", None), "devices", None)
    if devices is None or any(env in served for served in devices):
        return ""
    return f"it runs on {', '.join(map(str, devices)) or 'no device'}, and this is {env}"


def unmet(need: Require) -> Rejection | None:
    """Why the requirement is not met, or None when it is."""
    if need.any_of:
        reasons = [unmet(each) for each in need.any_of]
        if None in reasons:
            return None
        said = " and ".join(each.message for each in reasons if each is not None)
        hints = (need.hint, *(each.hint for each in reasons if each is not None))
        return Rejection(
            code="missing",
            message=f"needs one of several: {said}",
            hint=next(filter(None, hints), ""),
        )
    hint = need.hint or f"pip install '{need.distribution}{need.version}'"
    version = found_version(need)
    if version is None:
        return Rejection(
            code="missing",
            message=f"{need.distribution} {need.version}".strip() + " is not installed",
            hint=hint,
        )
    if not allows(need.version, version):
        return Rejection(
            code="version",
            message=f"{need.distribution} is {version}, wanted {need.version}",
            hint=hint,
        )
    return None


def found_version(need: Require) -> str | None:
    """The installed version of what is needed; None when the module or its distribution is absent.

    Only the top-level package is looked up: `find_spec` of a submodule would import its parents.
    """
    try:
        if find_spec(need.import_name.partition(".")[0]) is None:
            return None
        return importlib.metadata.version(need.distribution)
    except (ValueError, importlib.metadata.PackageNotFoundError):
        return None


def met(requirement: str, *, any_build: bool = False) -> bool:
    """Whether a PEP 508 requirement is installed; its marker and extras are not looked at.

    A build for CPUs, as torch's `2.13.0+cpu`, counts only when `any_build`: it lacks the kernels of
    other devices.
    """
    from packaging.requirements import Requirement  # as below

    need = Requirement(requirement)
    try:
        version = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return need.specifier.contains(version, prereleases=True) and (
        any_build or not version.endswith("+cpu")
    )


def package(requirement: str) -> str:
    """The distribution that a PEP 508 requirement names."""
    from packaging.requirements import Requirement  # as below

    return Requirement(requirement).name


def allows(specifier: str, version: str) -> bool:
    """Whether a PEP 440 specifier allows the version (pre-releases count)."""
    from packaging.specifiers import SpecifierSet  # 30 ms that few commands need to spend

    return SpecifierSet(specifier).contains(version, prereleases=True)
