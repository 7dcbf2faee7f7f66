"""`--opt NAME.FIELD=VALUE`."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge

from headstock import registry
from headstock.errors import PluginBroken, UsageError
from headstock.spi import SchedulerSpec, SpiRange


class Order(Enum):
    FIFO = "fifo"
    LIFO = "lifo"


@frozen(kw_only=True)
class Options:
    num_splits: int = field(default=1, validator=ge(1))
    scale: float = 1.0
    eager: bool = False
    label: str = "plain"
    limit: int | None = 4
    mode: Literal["a", "b"] = "a"
    order: Order = Order.FIFO


@frozen(kw_only=True)
class Unread:
    sizes: list[int] = field(factory=list)
    other = field(default=1)
    read: tuple[int, ...] = field(default=(), converter=lambda text: tuple(map(int, text)))


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> SchedulerSpec:
    module = ModuleType("fa_options")
    module.Options = Options  # type: ignore[attr-defined]
    module.Plain = dict  # type: ignore[attr-defined]
    module.Unread = Unread  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa_options", module)
    return make_spec("fa_options:Options")


def make_spec(options: str | None) -> SchedulerSpec:
    return SchedulerSpec(
        name="fa", spi=SpiRange(0, 3), summary="test", implementation="json:loads", options=options
    )


def test_nothing_assigned_gives_the_defaults(spec: SchedulerSpec) -> None:
    assert registry.make_options(spec) == Options()
    assert registry.make_options(spec, ["other.num_splits=7"]) == Options()


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("fa.num_splits=4", Options(num_splits=4)),
        ("fa.num-splits=4", Options(num_splits=4)),
        ("scheduler:fa.num_splits=4", Options(num_splits=4)),
        ("fa.scale=0.5", Options(scale=0.5)),
        ("fa.eager=on", Options(eager=True)),
        ("fa.eager=FALSE", Options(eager=False)),
        ("fa.label=a=b c", Options(label="a=b c")),
        ("fa.limit=none", Options(limit=None)),
        ("fa.limit=9", Options(limit=9)),
        ("fa.mode=b", Options(mode="b")),
        ("fa.order=lifo", Options(order=Order.LIFO)),
    ],
)
def test_an_assignment_is_converted_to_the_type_of_its_field(
    spec: SchedulerSpec, assignment: str, expected: Options
) -> None:
    assert registry.make_options(spec, [assignment]) == expected


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("fa.num_split=4", "; did you mean num_splits?"),
        ("fa.num_splits=four", "expected an integer"),
        ("fa.num_splits=0", "must be >= 1"),
        ("fa.scale=nan", "expected a finite number"),
        ("fa.eager=maybe", "expected one of on, off"),
        ("fa.limit=many", "expected none or an integer"),
        ("fa.mode=c", "expected one of a, b"),
        ("fa.order=x", "expected one of fifo, lifo"),
        ("fa.num_splits", "expected NAME.FIELD=VALUE"),
    ],
)
def test_a_bad_assignment_is_a_usage_error(
    spec: SchedulerSpec, assignment: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        registry.make_options(spec, [assignment])
    assert words in str(caught.value)


def test_the_last_assignment_wins(spec: SchedulerSpec) -> None:
    assert registry.make_options(spec, ["fa.num_splits=2", "fa.num_splits=3"]) == Options(
        num_splits=3
    )


def test_a_plugin_without_options_takes_none() -> None:
    assert registry.make_options(make_spec(None)) is None
    with pytest.raises(UsageError, match="'fa' has no options"):
        registry.make_options(make_spec(None), ["fa.x=1"])


def test_an_option_of_two_plugins_of_a_name_is_for_the_one_with_options(
    spec: SchedulerSpec,
) -> None:
    plain, given = make_spec(None), ["fa.num_splits=2", "scheduler:fa.num_splits=3", "radix.x=1"]
    assert registry.leave_to_namesakes(spec, given, [plain, spec]) == tuple(given)
    assert registry.leave_to_namesakes(plain, given, [plain, spec]) == tuple(given[1:])
    assert registry.leave_to_namesakes(plain, given, [plain]) == tuple(given)


def test_an_option_class_must_be_an_attrs_class(spec: SchedulerSpec) -> None:
    with pytest.raises(PluginBroken, match="not an attrs class"):
        registry.make_options(make_spec("fa_options:Plain"))
    with pytest.raises(PluginBroken, match="no_such_module"):
        registry.make_options(make_spec("no_such_module:Options"))


def test_a_field_that_no_text_can_be_read_for_is_its_authors_mistake_unless_it_reads_it_itself(
    spec: SchedulerSpec,
) -> None:
    for name in ("sizes", "other"):
        with pytest.raises(
            PluginBroken, match=f"its option '{name}': expected int, float.* got type "
        ):
            registry.make_options(make_spec("fa_options:Unread"), [f"fa.{name}=3"])
    assert registry.make_options(make_spec("fa_options:Unread"), ["fa.read=312"]) == Unread(
        read=(3, 1, 2)
    )


def test_an_assignment_for_nobody_is_found(spec: SchedulerSpec) -> None:
    assignments = (
        "fa.num_splits=1",
        "fi.x=2",
        "scheduler:fa.scale=2",
        "attention:fa.scale=2",
        "nonsense",
    )
    assert registry.find_unclaimed(assignments, [spec]) == (
        "fi.x=2",
        "attention:fa.scale=2",
        "nonsense",
    )
