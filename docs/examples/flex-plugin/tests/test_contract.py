"""The cases of headstock's contract, one by one: `pytest` in this folder, with `flex` installed."""

import pytest

from headstock_conformance import Case, list_cases


@pytest.mark.parametrize("case", list_cases("attention", "flex", "cpu"), ids=str)
def test_the_backend_keeps_the_contract(case: Case) -> None:
    case.run()
