"""Broken engines report their ends to the test's own folder."""

from core.faults.conftest import crash_reports

__all__ = ["crash_reports"]
