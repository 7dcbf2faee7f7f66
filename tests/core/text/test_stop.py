"""Stop strings against a search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.text.stop import StopStrings

STOPS = st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the match that ends first, of several the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text("ab日", max_size=3), max_size=12), stops=STOPS, include=st.booleans()
)
def test_any_cut_gives_the_text_up_to_the_first_complete_stop(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    search = StopStrings(stops, include=include)
    out, stop = "", None
    for piece in pieces:
        found = search.feed(piece)
        out, stop = out + found.text, found.stop
        if stop is not None:
            break
    else:
        out += search.finish()
    assert (out, stop) == expected("".join(pieces), stops, include)


def test_stop_string_split_across_tokens_leaks_nothing() -> None:
    search = StopStrings(["ab"])
    assert search.feed("xa").text == "x"
    found = search.feed("b and more")
    assert (found.text, found.stop) == ("", "ab")


def test_held_text_comes_out_when_it_begins_no_stop_string() -> None:
    search = StopStrings(["abc"])
    assert [search.feed(piece).text for piece in ("a", "b", "x")] == ["", "", "abx"]
    assert search.feed("ab").text == "" and search.finish() == "ab"


def test_a_stop_string_may_not_end_in_text_that_is_not_armed() -> None:
    search = StopStrings(["ab"])
    assert search.feed("ab", armed=False).text == "ab"
    assert search.feed("a", armed=False).text == ""
    found = search.feed("b", armed=True)
    assert (found.text, found.stop) == ("", "ab")
