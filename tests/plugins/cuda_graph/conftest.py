"""Toy engines that replay; those that fail report it to the test's own folder."""

from core.faults.conftest import crash_reports, toys

__all__ = ["crash_reports", "toys"]
