"""Plugins, found by metadata, loaded when chosen, checked against the contract. Importing it does
not import torch.
"""

from headstock.registry.assignments import options, unclaimed
from headstock.registry.entries import (
    Installed,
    find,
    group,
    installed,
    noun,
    suggestion,
    unknown_architecture,
    unknown_name,
)
from headstock.registry.extras import incomplete
from headstock.registry.first_party import sources
from headstock.registry.loading import implementation, imported, made, spec, specs
from headstock.registry.requirements import elsewhere, missing, require

__all__ = [
    "Installed",
    "elsewhere",
    "find",
    "group",
    "implementation",
    "imported",
    "incomplete",
    "installed",
    "made",
    "missing",
    "noun",
    "options",
    "require",
    "sources",
    "spec",
    "specs",
    "suggestion",
    "unclaimed",
    "unknown_architecture",
    "unknown_name",
]
