"""The entry point of `llguidance`."""

from __future__ import annotations

from headstock.spi import GrammarSpec, Require, SpiRange


def spec() -> GrammarSpec:
    """The spec of `llguidance`."""
    return GrammarSpec(
        name="llguidance",
        spi=SpiRange(0, 3),
        summary="JSON schemas, regular expressions, choices and grammars",
        implementation="headstock_llguidance.engine:LLGuidanceEngine",
        requires=(
            Require(
                import_name="llguidance",
                distribution="llguidance",
                version=">=1.9,<2",
                hint='pip install "llguidance>=1.9,<2"',
            ),
        ),
        options="headstock_llguidance.options:LLGuidanceOptions",
    )
