"""Check whether the packages that a plugin needs are installed, without importing any of them."""

from __future__ import annotations

import importlib.metadata
import re
from importlib.util import find_spec

from headstock.errors import CannotRun
from headstock.registry.loading import plugin_label
from headstock.spi import PluginSpec, Rejection, Require

_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
"""The name with which a PEP 508 requirement begins."""


def find_missing(spec: PluginSpec) -> tuple[Rejection, ...]:
    """List the requirements that are not met, as rejections."""
    return tuple(
        rejection for rejection in map(_check_requirement, spec.requires) if rejection is not None
    )


def require_installed(spec: PluginSpec) -> None:
    """Check that every requirement of the spec is met.   raises: CannotRun with what to install"""
    rejections = find_missing(spec)
    if rejections:
        text = "; ".join(
            f"{rejection.message}{f', install with: {rejection.hint}' if rejection.hint else ''}"
            for rejection in rejections
        )
        raise CannotRun(f"{plugin_label(spec)} cannot run here: {text}")


def _check_requirement(requirement: Require) -> Rejection | None:
    """Check one requirement; None when it is met."""
    if requirement.any_of:
        outcomes = [_check_requirement(alternative) for alternative in requirement.any_of]
        rejections = [rejection for rejection in outcomes if rejection is not None]
        if len(rejections) < len(outcomes):
            return None
        text = " and ".join(rejection.message for rejection in rejections)
        hints = (requirement.hint, *(rejection.hint for rejection in rejections))
        return Rejection(
            code="missing",
            message=f"needs one of several: {text}",
            hint=next(filter(None, hints), ""),
        )
    hint = requirement.hint or f"pip install '{requirement.distribution}{requirement.version}'"
    version = _installed_version(requirement)
    if version is None:
        return Rejection(
            code="missing",
            message=f"{requirement.distribution} {requirement.version}".strip()
            + " is not installed",
            hint=hint,
        )
    if not _is_version_allowed(requirement.version, version):
        return Rejection(
            code="version",
            message=f"{requirement.distribution}: expected {requirement.version}, got {version}",
            hint=hint,
        )
    return None


def _installed_version(requirement: Require) -> str | None:
    """Read the installed version of a requirement; None when its module or distribution is absent.

    Only the top-level package is looked up: `find_spec` of a submodule would import its parents.
    """
    # Both: metadata may outlive the files of a package, and files may lie there without metadata.
    try:
        if find_spec(requirement.import_name.partition(".")[0]) is None:
            return None
    except ValueError:
        return None
    return find_version(requirement.distribution)


def find_version(distribution: str) -> str | None:
    """Read the version of a distribution; None where it is absent, or its metadata unreadable."""
    try:
        # None, where METADATA has no version.
        version: str | None = importlib.metadata.version(distribution)
    except (ValueError, TypeError, importlib.metadata.PackageNotFoundError):
        return None
    return version


def is_requirement_met(requirement: str, *, any_build: bool = False) -> bool:
    """Whether a PEP 508 requirement is installed; its marker and extras are not read.

    A CPU build, as torch's `2.13.0+cpu`, counts only with `any_build`: it lacks the kernels of
    other devices.
    """
    version = find_version(requirement_name(requirement))
    if version is None or (version.endswith("+cpu") and not any_build):
        return False
    from packaging.requirements import InvalidRequirement, Requirement  # as below

    try:
        specifier = str(Requirement(requirement).specifier)
    except InvalidRequirement:
        return False
    return _is_version_allowed(specifier, version)


def requirement_name(requirement: str) -> str:
    """The distribution that a PEP 508 requirement names."""
    match = _DISTRIBUTION.match(requirement)
    return match[0] if match else requirement


def _is_version_allowed(specifier: str, version: str) -> bool:
    """Whether a PEP 440 specifier allows the version (pre-releases count).

    One that cannot be read allows none, and a version that is none is allowed by "" alone.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # 30 ms that few need to spend
    from packaging.version import InvalidVersion

    try:
        return not specifier or SpecifierSet(specifier).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False
