"""The command line. Importing it does not import torch."""

from headstock.cli.process import check_distinct_files
from headstock.cli.tables import fold_line, terminal_width

__all__ = ["check_distinct_files", "fold_line", "terminal_width"]
