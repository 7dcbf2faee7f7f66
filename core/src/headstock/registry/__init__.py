"""Find plugins by metadata, load the selected ones, and check them against the contract.

Importing it does not import torch.
"""

from headstock.registry.assignments import (
    find_unclaimed,
    leave_to_namesakes,
    make_family,
    make_options,
    make_schedule,
)
from headstock.registry.contract_checks import explain_absent_module, find_mismatch
from headstock.registry.culprit import Culprit, find_culprit
from headstock.registry.entries import (
    ANY_DECODER,
    InstalledPlugin,
    UnusableEntry,
    entry_point_group,
    explain_unusable,
    find_plugin,
    kind_label,
    list_installed,
    list_served_names,
    list_unusable,
    unknown_architecture_error,
    unknown_name_error,
)
from headstock.registry.extras import explain_missing_extras
from headstock.registry.first_party import CONFORMANCE_LINE, install_lines
from headstock.registry.loading import (
    import_implementation,
    import_object,
    load_spec,
    load_specs,
    make_part,
    plugin_label,
)
from headstock.registry.requirements import find_missing, find_version, require_installed

__all__ = [
    "ANY_DECODER",
    "CONFORMANCE_LINE",
    "Culprit",
    "InstalledPlugin",
    "UnusableEntry",
    "entry_point_group",
    "explain_absent_module",
    "explain_missing_extras",
    "explain_unusable",
    "find_culprit",
    "find_mismatch",
    "find_missing",
    "find_plugin",
    "find_unclaimed",
    "find_version",
    "import_implementation",
    "import_object",
    "install_lines",
    "kind_label",
    "leave_to_namesakes",
    "list_installed",
    "list_served_names",
    "list_unusable",
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
