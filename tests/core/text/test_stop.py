"""Stop strings against a search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.text.stop import StopStringMatcher

STOPS = st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the match that ends first, of several the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=count_examples(500))
@given(
    pieces=st.lists(st.text("ab日", max_size=3), max_size=12), stops=STOPS, include=st.booleans()
)
def test_any_cut_gives_the_text_up_to_the_first_complete_stop(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    search = StopStringMatcher(stops, include=include)
    out, stop = "", None
    for piece in pieces:
        found = search.add_text(piece)
        out, stop = out + found.text, found.stop
        if stop is not None:
            break
    else:
        out += search.flush()
    assert (out, stop) == expected("".join(pieces), stops, include)


def test_stop_string_split_across_tokens_leaks_nothing() -> None:
    search = StopStringMatcher(["ab"])
    assert search.add_text("xa").text == "x"
    found = search.add_text("b and more")
    assert (found.text, found.stop) == ("", "ab")


def test_held_text_comes_out_when_it_begins_no_stop_string() -> None:
    search = StopStringMatcher(["abc"])
    assert [search.add_text(piece).text for piece in ("a", "b", "x")] == ["", "", "abx"]
    assert search.add_text("ab").text == "" and search.flush() == "ab"


def test_a_stop_string_may_not_end_in_text_that_is_not_armed() -> None:
    search = StopStringMatcher(["ab"])
    assert search.add_text("ab", can_stop=False).text == "ab"
    assert search.add_text("a", can_stop=False).text == ""
    found = search.add_text("b", can_stop=True)
    assert (found.text, found.stop) == ("", "ab")
