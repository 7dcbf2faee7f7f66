"""A session of pytest within a test: the tests of a row, run on a broken engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
from attrs import define, field
from hypothesis import Phase, settings

from .broken import Mutant

QUICK = {
    "phases": (Phase.explicit, Phase.generate),  # an example that fails need not be a small one
    "derandomize": True,
    "database": None,
    "report_multiple_bugs": False,
}
MORE = 50
"""Times as many examples as usual: a session ends with the first that fails."""

SHORT = 10.0
"""Seconds for which tests wait for a broken engine, which may never do what they wait for."""

OPTIONS = (
    "-s",
    "--tb=no",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "-p",
    "no:xdist",
    "-m",
    "full or not full",  # `full` ones too: a broken engine must fail them, whenever they are run
)


@define(eq=False)  # pytest keeps plugins in sets
class Breaking:
    """A plugin for pytest: the engine is broken while tests run, though not while their modules are
    imported.

    `said` is what tests that failed had to say, by their names; of a test that failed no further
    cases are run.
    """

    mutant: Mutant
    said: dict[str, str] = field(factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Break the engine, and let Hypothesis end at the first failure."""
        name = settings.get_current_profile_name()
        before = settings.get_profile(name)
        # State machines, which a test runs itself, have what the profile says.
        settings.register_profile("broken", max_examples=MORE * before.max_examples, **QUICK)
        settings.load_profile("broken")
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(patience, "seconds", SHORT)
                for function in {
                    item.obj for item in session.items if hasattr(item.obj, "hypothesis")
                }:
                    # A test has the settings of the profile that was loaded when it was defined.
                    attribute = "_hypothesis_internal_use_settings"
                    usual = getattr(function, attribute)
                    # What is drawn depends on a test's own text: a rename must not hide a mutant.
                    most = MORE * usual.max_examples
                    patch.setattr(function, attribute, settings(usual, max_examples=most, **QUICK))
                self.mutant.apply(patch)
                return (yield)
        finally:
            settings.load_profile(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        """Pass over further cases of a test that has failed."""
        if item.originalname in self.said:
            pytest.skip("another case has failed")

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any]) -> None:
        """Note a failure."""
        self.said.setdefault(getattr(node, "originalname", node.name), told(call.excinfo.value))


def told(error: BaseException | None) -> str:
    """What an error says, those in it, and those that led to it."""
    if error is None:
        return ""
    others = (*getattr(error, "exceptions", ()), error.__cause__ or error.__context__)
    return "\n".join([f"{type(error).__name__}: {error}", *map(told, others)])


def failures(mutant: Mutant, tests: Iterable[str], folder: Path) -> dict[str, str]:
    """What those of the tests (node ids) say that fail on the broken engine, by name."""
    breaking = Breaking(mutant)
    code = pytest.main([*OPTIONS, f"--basetemp={folder}", *tests], plugins=[breaking])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), (
        f"the tests could not be run: {code!r}"
    )
    return breaking.said
