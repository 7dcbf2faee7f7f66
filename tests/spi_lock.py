"""The contract as text: every public name that plugins may import, with fields and signatures.

`python tests/spi_lock.py` rewrites core/spi.lock, on purpose; `--lock` locks it too. Once it is
locked, it is rewritten only when `headstock.spi.SPI` was raised as the changes demand. `--open`
leaves it open where every kind has a new edition.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from contract_change import find_violations, parse_contract
from contract_stub import find_origins, make_stub

from headstock import spi

LOCK = Path(__file__).parents[1] / "core" / "spi.lock"

LIBRARIES = {
    "headstock.nn": ("attention", "runner", "ops", "model"),
    "headstock.ops": ("ops",),
    "headstock_conformance": (
        "attention",
        "cache",
        "ops",
        "scheduler",
        "runner",
        "model",
        "proposer",
        "logits",
    ),
}
"""Package beside headstock.spi -> the kinds whose plugins may import it."""

NOT_COMPARED = frozenset({"SPI", "RESERVED"})
"""Names whose values the header of the lock has."""


def make_lock(*, locked: bool) -> str:
    """The whole contract: a header, then one section a module."""
    origins = find_origins(spi)
    roots = {
        kind: tuple(
            sorted(name for name in spi.__all__ if origins[name] == f"headstock.spi.{kind}")
        )
        for kind in spi.SPI
    }
    present = {name: kinds for name, kinds in LIBRARIES.items() if find_spec(name) is not None}
    header = [
        f"locked = {locked}",
        *make_table("versions", spi.SPI),
        *make_table("roots", roots),
        *make_table("libraries", present),
        "",
    ]
    return "\n".join(
        [
            *header,
            make_stub(spi, NOT_COMPARED),
            *(make_stub(import_module(name)) for name in present),
        ]
    )


def make_table(name: str, table: Mapping[str, object]) -> list[str]:
    """A table of the header, one key a line."""
    return [f"{name} = {{", *(f"    {key!r}: {value!r}," for key, value in table.items()), "}"]


def main(arguments: list[str]) -> int:
    """Rewrite the lock; 1 when it is locked and the versions were not raised."""
    before = LOCK.read_text()
    locked = "--lock" in arguments or (parse_contract(before).locked and "--open" not in arguments)
    after = make_lock(locked=locked)
    problems = find_violations(before, after)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    if not problems:
        LOCK.write_text(after)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
