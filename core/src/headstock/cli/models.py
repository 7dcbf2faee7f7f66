"""`headstock models`: the models on this machine, and whether they can run here."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from attrs import asdict

from headstock.cli.notes import start_logs
from headstock.cli.process import reserve_output
from headstock.cli.tables import print_table
from headstock.config.flag_parser import FlagParser
from headstock.config.flags import add_engine_flags, resolve_flags

EPILOG = """
The names are what run, chat and serve take. Exit code 0, whether or not a model can run.
"""
if TYPE_CHECKING:
    from headstock.doctor.local_models import LocalModel

HEADER = ("model", "size", "architecture", "runs here")


def main(arguments: list[str]) -> int:
    """Run `headstock models ARGUMENTS` and return the exit code.

    raises: UsageError
    """
    args = make_parser().parse_args(arguments)
    resolved = resolve_flags(args, os.environ)
    # What reading a configuration warns of belongs to a start, and not to a list.
    start_logs(resolved, quiet=True)
    with reserve_output(args.json):
        # deferred: it imports torch
        from headstock.doctor.local_models import list_local_models
        from headstock.startup.memory_plan import format_bytes

        models = list(list_local_models(resolved.engine))
    if args.json:
        print(json.dumps([asdict(each) for each in models], indent=2))
        return 0
    rows = [
        (
            each.name,
            format_bytes(each.size),
            each.architecture or "-",
            _format_verdict(each),
        )
        for each in models
    ]
    print_table(HEADER, rows, sys.stdout, spare=("architecture",))
    return 0


def _format_verdict(model: LocalModel) -> str:
    """Whether a model runs here, in a cell."""
    if not model.runs:
        return f"no: {model.how}"
    return f"with {model.how}" if model.how else "yes"


def make_parser() -> FlagParser:
    """The parser of `headstock models`."""
    root = FlagParser(
        prog="headstock models",
        description="List the installed checkpoints and the models in the hub's cache, and say "
        "whether each can run on this machine with these settings.",
        common=("--json", "--device", "--dtype", "--memory-ratio"),
        epilog=EPILOG,
    )
    root.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_flags(root)
    return root
