"""What requests may give plugins: which keys are taken, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import field, frozen
from attrs.validators import ge, instance_of

from headstock import LLM, SamplingParams
from headstock.errors import HeadstockError, PluginBroken, RequestError, UsageError
from headstock.selection.request_args import collect_request_args
from headstock.spi import LogitsSpec, PluginSpec, SchedulerSpec, SpiRange


@frozen
class Ban:
    """Arguments of a plugin: one that is checked, one that has a default."""

    ban: int = field(validator=[instance_of(int), ge(0)])
    for_tokens: int = 5


@frozen
class Deadline:
    """Arguments of another plugin."""

    deadline_ms: float | None = None
    _key: str = field(init=False, default="not an argument")


@frozen
class BanAgain:
    """Arguments that take a key of `Ban` again."""

    ban: int


@frozen
class Explodes:
    """Arguments that cannot be made."""

    fuse: int = 0

    def __attrs_post_init__(self) -> None:
        raise SystemExit("boom")


class NoAttrs:
    """No class of arguments."""


def spec(name: str, arguments: type | None, kind: type[PluginSpec] = LogitsSpec) -> PluginSpec:
    """What a plugin says of itself that takes these."""
    return kind(
        name=name,
        spi=SpiRange(0, 3),
        summary="a plugin",
        implementation="x:y",
        request_args=None if arguments is None else f"{__name__}:{arguments.__name__}",
    )


CHOSEN = (spec("banner", Ban), spec("plain", None), spec("timer", Deadline))


@pytest.mark.feature("R2")
def test_each_plugin_gets_what_it_claims() -> None:
    args = collect_request_args(CHOSEN)

    assert args.make(None) == args.make({}) == {}
    assert args.make({"deadline_ms": 2.5, "ban": 7}) == {
        "banner": Ban(7, 5),
        "timer": Deadline(2.5),
    }
    assert args.make({"for_tokens": 1, "ban": 0}) == {"banner": Ban(0, 1)}


@pytest.mark.feature("R2")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"bann": 1},
            "extra_args: no chosen plugin takes 'bann'; taken: ban (by banner), for_tokens (by "
            "banner), deadline_ms (by timer); did you mean ban?",
        ),
        ({"key": 1}, "extra_args: no chosen plugin takes 'key'; taken: ban (by banner), "),
        ({"ban": -1}, "extra_args: 'banner' does not take {'ban': -1}: 'ban' must be >= 0: -1"),
        ({"ban": "x"}, "extra_args: 'banner' does not take {'ban': 'x'}: "),
        ({"for_tokens": 1}, "extra_args: 'banner' does not take {'for_tokens': 1}: "),
    ],
)
def test_what_no_plugin_takes_is_refused_with_what_there_is(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        collect_request_args(CHOSEN).make(given)
    assert str(raised.value).startswith(said)
    assert raised.value.parameter == "extra_args" and "\n" not in str(raised.value)


def test_a_class_that_raises_refuses_its_request_alone() -> None:
    with pytest.raises(RequestError, match=r"'bomb' raised SystemExit for .*; report it"):
        collect_request_args((spec("bomb", Explodes),)).make({"fuse": 1})


@pytest.mark.parametrize(
    ("specs", "kind", "said"),
    [
        (
            (*CHOSEN, spec("again", BanAgain)),
            UsageError,
            "'banner' and 'again' both take 'ban' of extra_args; choose another instead of one",
        ),
        ((spec("x", NoAttrs),), PluginBroken, "is not an attrs class"),
        ((spec("x", Ban, SchedulerSpec),), PluginBroken, "only logits processors are given any"),
        ((spec("banner", Ban), spec("banner", Deadline)), UsageError, "are called 'banner' and"),
    ],
)
def test_claims_that_cannot_stand_end_the_start(
    specs: tuple[PluginSpec, ...], kind: type[HeadstockError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        collect_request_args(specs)


@pytest.mark.feature("R2")
def test_an_engine_refuses_what_none_of_its_plugins_takes_before_anything_runs() -> None:
    with LLM("demo", num_pages=64) as llm:
        asked = [SamplingParams(max_tokens=2), SamplingParams(extra_args={"ban": 3})]
        with pytest.raises(RequestError) as raised:
            llm.generate(["Once", "Once"], asked)
        params = SamplingParams(max_tokens=2, user="ada", extra_args={})
        answers = llm.generate(["Once"] * 2, params)
    assert str(raised.value) == (
        "prompts[1]: extra_args: no chosen plugin takes 'ban'; none of them takes any"
    )
    assert [len(each.outputs[0].token_ids) for each in answers] == [2, 2]
