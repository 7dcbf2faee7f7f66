"""The contract changes only on purpose."""

from __future__ import annotations

import difflib

from spi_lock import LOCK, lock_text


def test_the_contract_is_what_spi_lock_says() -> None:
    changes = difflib.unified_diff(
        LOCK.read_text().splitlines(), lock_text().splitlines(), "spi.lock", "now", lineterm=""
    )
    assert "\n".join(changes) == "", (
        "if it was meant: change headstock.spi.SPI and run `python tests/spi_lock.py`"
    )
