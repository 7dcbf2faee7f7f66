"""Find plugins by metadata, load the selected ones, and check them against the contract.

Importing it does not import torch.
"""

from headstock.registry.assignments import (
    find_unclaimed,
    make_family,
    make_options,
    make_schedule,
)
from headstock.registry.contract_checks import find_mismatch
from headstock.registry.culprit import Culprit, find_culprit
from headstock.registry.entries import (
    InstalledPlugin,
    entry_point_group,
    find_plugin,
    kind_label,
    list_installed,
    unknown_architecture_error,
    unknown_name_error,
)
from headstock.registry.extras import explain_missing_extras
from headstock.registry.first_party import install_lines
from headstock.registry.loading import (
    import_implementation,
    import_object,
    load_spec,
    load_specs,
    make_part,
    plugin_label,
)
from headstock.registry.requirements import find_missing, require_installed

__all__ = [
    "Culprit",
    "InstalledPlugin",
    "entry_point_group",
    "explain_missing_extras",
    "find_culprit",
    "find_mismatch",
    "find_missing",
    "find_plugin",
    "find_unclaimed",
    "import_implementation",
    "import_object",
    "install_lines",
    "kind_label",
    "list_installed",
    "load_spec",
    "load_specs",
    "make_family",
    "make_options",
    "make_part",
    "make_schedule",
    "plugin_label",
    "require_installed",
    "unknown_architecture_error",
    "unknown_name_error",
]
