"""Checks of plugins against the contract: by `headstock plugins check`, or by pytest in an author's
repository.
"""

from headstock_conformance.case import Case, CaseResult, CheckReport, Outcome
from headstock_conformance.check import check_plugin, list_cases

__all__ = ["Case", "CaseResult", "CheckReport", "Outcome", "check_plugin", "list_cases"]
