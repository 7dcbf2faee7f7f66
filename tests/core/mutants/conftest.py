"""The toy engines of the tests of faults."""

from core.faults.conftest import crash_reports, toys

__all__ = ["crash_reports", "toys"]
