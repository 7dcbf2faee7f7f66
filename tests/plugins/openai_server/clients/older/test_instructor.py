"""instructor, unchanged, reads models of pydantic from a server with the demo model."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import pydantic
import pytest
from served import Served


class Sum(pydantic.BaseModel):
    """The form of an answer."""

    sum: Literal[4, 5]


@pytest.mark.feature("W3", "W5")
@pytest.mark.parametrize(
    "mode",
    [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS],
)
def test_a_model_is_read_whole_and_as_it_grows(
    chooser: Served, base_url: str, mode: instructor.Mode
) -> None:
    client: Any = instructor.from_provider(
        "openai/demo", base_url=base_url, api_key=chooser.key, mode=mode
    )
    asked: Any = {
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "response_model": Sum,
        "max_retries": 0,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    assert isinstance(whole, Sum)
    *_, last = client.chat.completions.create_partial(**asked)
    assert last.sum == whole.sum
