"""The cases of a logits processor: neutral rows, independent rows, and the best token.

Only the author knows the meaning of column values. They are therefore random, and rows are compared
with themselves: with other rows, in another order, and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import fields, frozen
from torch import Tensor

from headstock import registry
from headstock.errors import CannotRun, RequestError, describe_error, shorten
from headstock.selection.processors import SelectedProcessor
from headstock.spi import DeviceEnv, LogitColumn, LogitsProcessor, LogitsSpec
from headstock_conformance.case import Case
from headstock_conformance.device_reads import DeviceRead, forbid_device_reads
from headstock_conformance.ops.cases import noise

ROWS, VOCAB = 5, 90
MANY_ROWS = 70
VALUES = (0, 1, 2, 3, 5, -1, -3, 0.01, 0.5, 0.99, 1.5, 10, 50, 89, 1000, -1000)
"""Column values that all rows of a step share."""
ARGUMENTS: tuple[Any, ...] = (
    0,
    1,
    5,
    89,
    0.5,
    1.5,
    -1,
    True,
    False,
    "a",
    (),
    (1,),
    (1, 5, 7),
    {},
    {"1": 2.0},
)
"""Values that requests may give; a class of arguments refuses invalid ones."""


@frozen(kw_only=True)
class Subject:
    """A processor, made with its default options, and the device of its tensors."""

    spec: LogitsSpec
    processor: LogitsProcessor
    device: str

    def neutral_columns(self) -> dict[str, Tensor]:
        """The columns of rows without arguments."""
        return {name: fill(column, self.device) for name, column in self.processor.columns.items()}

    def draw(self) -> tuple[Tensor, Tensor]:
        """Logits and positions; some tokens are forbidden."""
        logits = noise(ROWS, VOCAB, dtype=torch.float32, device=self.device, scale=3.0)
        logits[1, ::7] = -torch.inf
        if not self.processor.changes_argmax:
            logits -= logits.amax(-1, keepdim=True)
        return logits, torch.arange(ROWS, device=self.device) * 11 + 3

    def draw_columns(self) -> dict[str, Tensor]:
        """Columns in which every second row has its own values, the others neutral ones."""
        return {
            name: draw_values(column, self.device, seed)
            for seed, (name, column) in enumerate(self.processor.columns.items())
        }

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The processor's scores for random values; it may only write to the logits.

        raises: CannotRun when it raises
        """
        inputs = {"at": at.clone(), **{name: column.clone() for name, column in columns.items()}}
        try:
            scores = self.processor.apply(logits.clone(), inputs["at"], dict(columns))
        except (IndexError, ValueError, RuntimeError) as error:
            raise CannotRun(
                f"it raised {describe_error(error)} for random values of the kit; they may be none "
                "that requests can have"
            ) from error
        assert torch.equal(inputs.pop("at"), at), "apply writes to the positions"
        for name, column in inputs.items():
            assert torch.equal(column, columns[name]), f"apply writes to the column {name!r}"
        return scores


def fill(column: LogitColumn, device: str) -> Tensor:
    """A column of neutral values."""
    shape = (ROWS, column.width) if column.width else (ROWS,)
    return torch.full(shape, column.neutral, dtype=getattr(torch, column.dtype), device=device)


def draw_values(column: LogitColumn, device: str, seed: int) -> Tensor:
    """A column with drawn values in every second row: small factors, or ids of tokens."""
    values = fill(column, device)
    size = values[::2].shape
    if column.dtype == "int64":
        drawn = torch.randint(VOCAB, size, generator=torch.Generator().manual_seed(seed))
    else:
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5
    values[::2] = drawn.to(device)
    return values


def pick(
    rows: Sequence[int], logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The arguments of `apply` for some rows, in this order."""
    picked = torch.tensor(rows, device=logits.device)
    return logits[picked], at[picked], {name: column[picked] for name, column in columns.items()}


def list_cases(spec: LogitsSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of a processor."""
    checks: dict[str, Callable[[Subject], object]] = {
        "the columns stay the same": check_columns,
        "a request that gives no argument": check_row,
        "neutral rows stay as they are": check_neutral,
        "shape and type of the logits": check_shape,
        "a row depends on itself alone": check_rows_alone,
        "neutral rows beside others": check_beside,
        "the same rows again": check_again,
        "rows that move and leave": check_moved,
        "any number of rows": check_counts,
        "the best token stays, if it says so": check_best,
        "values of requests": check_values,
        "the device is not read": check_reads,
    }
    return tuple(
        Case(name, partial(run_with, spec, opt, env.device, run)) for name, run in checks.items()
    )


def run_with(
    spec: LogitsSpec, opt: Sequence[str], device: str, run: Callable[[Subject], object]
) -> None:
    """Make the processor as the engine does, and run a case.   raises: PluginBroken, ValueError"""
    options = () if spec.options is None else (registry.make_options(spec, opt),)
    processor = registry.make_part(spec, LogitsProcessor, *options)
    run(Subject(spec=spec, processor=processor, device=device))


def check_columns(subject: Subject) -> None:
    """Memory and graphs are planned for them."""
    first, second = dict(subject.processor.columns), dict(subject.processor.columns)
    assert first == second, "columns gives other arguments when read again"
    for name, column in first.items():
        assert isinstance(column, LogitColumn), f"the column {name!r} is not a LogitColumn"
    assert isinstance(subject.processor.changes_argmax, bool), "changes_argmax is not a bool"


def check_row(subject: Subject) -> None:
    """A request without arguments gets neutral values."""
    prompt = np.arange(12, dtype=np.int32)
    prompt.setflags(write=False)
    values: Mapping[str, Any] | None = subject.processor.row(None, prompt, VOCAB)
    unknown = set(values or {}) - set(subject.processor.columns)
    assert not unknown, f"row gives values of {sorted(unknown)}, which are not columns"
    assert np.array_equal(prompt, np.arange(12)), "row writes to the prompt"


def check_neutral(subject: Subject) -> None:
    """Rows next to one with arguments must not change."""
    logits, at = subject.draw()
    scores = subject.processor.apply(logits.clone(), at, subject.neutral_columns())
    wrong = (scores != logits).any(-1)
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {ROWS} rows with neutral values change"


def check_shape(subject: Subject) -> None:
    """Samplers read float32 of the whole vocabulary."""
    logits, at = subject.draw()
    scores = subject.processor.apply(logits.clone(), at, subject.neutral_columns())
    assert scores.shape == logits.shape, f"apply returns {tuple(scores.shape)} for {(ROWS, VOCAB)}"
    assert scores.dtype == torch.float32, f"apply: expected float32, got {scores.dtype}"


def check_rows_alone(subject: Subject) -> None:
    """The same row gives the same scores next to any others, and when repeated."""
    logits, at = subject.draw()
    columns = subject.neutral_columns()
    together = subject.processor.apply(logits.clone(), at, columns)
    picked = torch.tensor([3, 1, 3], device=subject.device)
    some = {name: column[picked] for name, column in columns.items()}
    alone = subject.processor.apply(logits[picked].clone(), at[picked], some)
    assert torch.equal(alone, together[picked]), "a row's scores depend on the other rows"


def check_beside(subject: Subject) -> None:
    """A batch has rows with arguments and rows without."""
    logits, at = subject.draw()
    scores = subject.apply(logits, at, subject.draw_columns())
    assert torch.equal(scores[1::2], logits[1::2]), (
        "rows with neutral values change next to rows with other values"
    )


def check_again(subject: Subject) -> None:
    """No state is kept of a row: a resumed request gets the same scores."""
    logits, at = subject.draw()
    columns = subject.draw_columns()
    first = subject.apply(logits, at, columns).clone()
    subject.apply(*pick([4, 0], logits * 0.5, at + 1, columns))
    assert is_same(subject.apply(logits, at, columns), first), (
        "the same rows get other scores the second time"
    )


def check_moved(subject: Subject) -> None:
    """Rows change their order when some have left."""
    logits, at = subject.draw()
    columns = subject.draw_columns()
    together = subject.apply(logits, at, columns)
    for rows in ([4, 3, 2, 1, 0], [2, 0, 4], [1, 4], [0, 0, 2, 0]):
        scores = subject.apply(*pick(rows, logits, at, columns))
        assert is_close(scores, together[rows]), (
            f"a row's scores depend on its place: rows {rows} of a batch get others"
        )


def check_counts(subject: Subject) -> None:
    """A batch has one row or hundreds."""
    logits, at = subject.draw()
    columns = subject.draw_columns()
    together = subject.apply(logits, at, columns)
    for count in (1, 2, 7, 64, 257):
        rows = [row % ROWS for row in range(count)]
        scores = subject.apply(*pick(rows, logits, at, columns))
        assert scores.shape == (count, VOCAB), (
            f"apply returns {tuple(scores.shape)} for {(count, VOCAB)}"
        )
        assert is_close(scores, together[rows]), f"rows get other scores among {count}"


def check_best(subject: Subject) -> None:
    """Greedy rows skip a processor that keeps the best token."""
    if subject.processor.changes_argmax:
        return
    for name, logits, at, columns in list_steps(subject):
        try:
            scores = subject.apply(logits, at, columns)
        except CannotRun:
            if name == "drawn":
                raise
            continue
        best = logits.argmax(-1, keepdim=True)
        lost = (scores.gather(1, best) != scores.amax(-1, keepdim=True))[:, 0]
        assert not bool(lost.any()), (
            "changes_argmax is False, and another token becomes the best "
            f"(with {name} values, in {int(lost.sum())} of {len(logits)} rows)"
        )


def list_steps(
    subject: Subject,
) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Tensor]]]:
    """Steps whose columns have many kinds of values: a description, logits, positions, columns.

    Ids among them are each row's best token, its second one and others.
    """
    logits, at = subject.draw()
    yield "drawn", logits, at, subject.draw_columns()
    logits = noise(MANY_ROWS, VOCAB, dtype=torch.float32, device=subject.device, seed=3, scale=3.0)
    logits -= logits.amax(-1, keepdim=True)
    ranked = logits.argsort(-1, descending=True)
    at = torch.arange(MANY_ROWS, device=subject.device).pow(2)
    columns = subject.processor.columns
    for number in VALUES:
        yield f"{number:g} as", logits, at, fill_columns(columns, logits, float(number))
    for rank in (0, 1, VOCAB - 1):
        values = fill_columns(columns, logits, 1.0)
        for name, column in columns.items():
            if column.dtype == "int64":
                ids = ranked[:, rank]
                values[name] = ids[:, None].expand(-1, column.width) if column.width else ids
        yield f"ids of rank {rank} as", logits, at, values
    for values_of_row in request_values(subject):
        neutral = {name: column.neutral for name, column in columns.items()}
        given = {**neutral, **values_of_row}
        yield (
            "a request's",
            logits,
            at,
            {
                name: torch.as_tensor(
                    np.asarray(given[name]),
                    dtype=getattr(torch, column.dtype),
                    device=logits.device,
                )
                .expand((MANY_ROWS, column.width) if column.width else (MANY_ROWS,))
                .contiguous()
                for name, column in columns.items()
            },
        )


def fill_columns(
    columns: Mapping[str, LogitColumn], logits: Tensor, number: float
) -> dict[str, Tensor]:
    """Columns of one number in all rows."""
    return {
        name: torch.full(
            (len(logits), column.width) if column.width else (len(logits),),
            number if column.dtype == "float32" else int(number),
            dtype=getattr(torch, column.dtype),
            device=logits.device,
        )
        for name, column in columns.items()
    }


def list_arguments(subject: Subject) -> list[Any]:
    """Arguments of requests, as far as the class accepts them; None without a class."""
    if subject.spec.request_args is None:
        return [None]
    kind: Any = registry.import_object(subject.spec, subject.spec.request_args)
    names = [field.name.lstrip("_") for field in fields(kind)]
    made: list[Any] = [None]
    for value in ARGUMENTS:
        for given in (dict.fromkeys(names, value), *({name: value} for name in names)):
            try:
                made.append(kind(**given))
            except (TypeError, ValueError):
                continue
    return made


def request_values(subject: Subject) -> Iterator[dict[str, np.ndarray]]:
    """The values of `row` for the arguments, as columns.

    raises: AssertionError when columns cannot hold the values
    """
    selected = SelectedProcessor(
        spec=subject.spec, processor=subject.processor, columns=subject.processor.columns
    )
    for args in list_arguments(subject):
        for length in (1, 12, 700):
            prompt = np.arange(length, dtype=np.int32) % VOCAB
            prompt.setflags(write=False)
            try:
                subject.processor.row(args, prompt, VOCAB)
            except ValueError:
                continue  # a refusal
            try:
                values = selected.make_values(args, prompt, VOCAB)
            except RequestError as error:
                raise AssertionError(
                    f"row({shorten(args)}) for a prompt of {length} tokens: {error}"
                ) from error
            yield dict(values or {})


def check_values(subject: Subject) -> None:
    """The values of `row` fit the columns for all arguments."""
    for values in request_values(subject):
        assert values.keys() <= subject.processor.columns.keys()


def check_reads(subject: Subject) -> None:
    """No number is read, which would stop the host and be wrong in a graph."""
    for name, logits, at, columns in list_steps(subject):
        try:
            with forbid_device_reads():
                subject.processor.apply(logits.clone(), at.clone(), dict(columns))
        except DeviceRead:
            raise
        except (IndexError, ValueError, RuntimeError) as error:
            if name == "drawn":
                raise CannotRun(f"it raised {describe_error(error)} for random values") from error


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether scores are equal; NaN is equal to itself."""
    return torch.equal(first.nan_to_num(nan=7e7), second.nan_to_num(nan=7e7))


def is_close(first: Tensor, second: Tensor) -> bool:
    """Whether scores are equal up to the order of sums, which may depend on the number of rows."""
    return torch.allclose(first, second, rtol=1e-5, atol=1e-5, equal_nan=True)
