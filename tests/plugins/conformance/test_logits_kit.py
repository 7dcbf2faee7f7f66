"""The check of logits processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from headstock.spi import DeviceEnv, LogitColumn, LogitsProcessor, LogitsSpec, SpiRange
from headstock_conformance.case import Outcome, run_case
from headstock_conformance.logits.checks import list_cases


class Shifted(LogitsProcessor):
    """Adds a number to the scores of a row."""

    changes_argmax = False

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        return {"shift": LogitColumn(neutral=0.0)}

    def row(self, args: Any, prompt: Any, vocab: int) -> Mapping[str, Any] | None:
        return None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + columns["shift"][:, None]


class NeutralChanged(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits * 0.5


class RowsMixed(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits - logits.nan_to_num(neginf=0.0).mean()


class Halved(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits.to(torch.bfloat16)


class Unknown(Shifted):
    def row(self, args: Any, prompt: Any, vocab: int) -> Mapping[str, Any] | None:
        return {"other": 1.0}


class NeighbourChanged(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + columns["shift"].sum()


class Noisy(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + columns["shift"][:, None] * torch.rand(logits.shape)


class Remembering(Shifted):
    calls = 0

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        return logits + columns["shift"][:, None] * self.calls


class PlaceCounted(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + (columns["shift"] * torch.arange(len(logits)))[:, None]


class FewRows(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        logits[:32] += columns["shift"][:32, None]
        return logits


class ColumnsWritten(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        shift = columns["shift"].mul_(2.0)
        return logits + shift[:, None]


class BestLost(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits * (1.0 - 2.0 * columns["shift"])[:, None]


class BestLostForFew(Shifted):
    """Turns scores round where the column is larger than 20."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return torch.where(columns["shift"][:, None] > 20, -logits, logits)


class Banned(Shifted):
    """Forbids a token, and says that the best one stays."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        return {"ban": LogitColumn(neutral=-1, dtype="int64")}

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        tokens = torch.arange(logits.shape[1])
        return logits.masked_fill(tokens == columns["ban"][:, None], -torch.inf)


class ValueOfText(Shifted):
    def row(self, args: Any, prompt: Any, vocab: int) -> Mapping[str, Any] | None:
        return {"shift": "1.0"}


class ValueOfLongPrompts(Shifted):
    """Gives two numbers for one, for prompts of more than 500 tokens."""

    def row(self, args: Any, prompt: Any, vocab: int) -> Mapping[str, Any] | None:
        return {"shift": [0.0, 1.0]} if len(prompt) > 500 else None


class RowOfPairs(Shifted):
    def row(self, args: Any, prompt: Any, vocab: int) -> Any:
        return [("shift", 1.0)]


class Reads(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        if float(columns["shift"].max()) == 0.0:
            return logits
        return super().apply(logits, at, columns)


class ReadsList(Shifted):
    """Reads where there are many rows."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        if len(logits) > 60:
            columns["shift"].tolist()
        return super().apply(logits, at, columns)


class ReadsMask(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        used = columns["shift"] != 0
        scores = logits.clone()
        scores[used] = logits[used] + columns["shift"][used][:, None]
        return scores


class ReadsNumpy(Shifted):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        shift = torch.tensor(columns["shift"].numpy().copy())
        return logits + shift[:, None]


BROKEN = {
    BestLostForFew: "changes_argmax is False, and another token becomes the best",
    Banned: "another token becomes the best (with",
    ValueOfText: "column 'shift': expected float32 number, got",
    ValueOfLongPrompts: "for a prompt of 700 tokens",
    RowOfPairs: "expected None, or values of shift",
    Reads: "it reads the device by Tensor.__float__",
    ReadsList: "it reads the device by Tensor.tolist",
    ReadsMask: "it reads the device by an index of bools",
    ReadsNumpy: "it reads the device by Tensor.numpy",
    NeighbourChanged: "rows with neutral values change next to rows with other values",
    Noisy: "the same rows get other scores the second time",
    Remembering: "the same rows get other scores the second time",
    PlaceCounted: "a row's scores depend on its place: rows [4, 3, 2, 1, 0] of a batch get others",
    FewRows: "rows get other scores among 64",
    ColumnsWritten: "apply writes to the column 'shift'",
    BestLost: "changes_argmax is False, and another token becomes the best",
    NeutralChanged: "5 of 5 rows with neutral values change",
    RowsMixed: "a row's scores depend on the other rows",
    Halved: "apply: expected float32, got torch.bfloat16",
    Unknown: "row gives values of ['other'], which are not columns",
}


def check(kind: type[Shifted]) -> list[str]:
    """The reasons of the cases that fail."""
    spec = LogitsSpec(
        name="shifted",
        spi=SpiRange(0, 3),
        summary="a number more",
        implementation=f"plugins.conformance.test_logits_kit:{kind.__name__}",
    )
    results = [run_case(case) for case in list_cases(spec, DeviceEnv(device="cpu"))]
    return [result.reason for result in results if result.outcome is not Outcome.PASSED]


def test_a_right_processor_passes() -> None:
    assert check(Shifted) == []


@pytest.mark.feature("R7")
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_wrong_processor_fails_and_its_fault_is_named(kind: type[Shifted]) -> None:
    reasons = check(kind)
    assert any(BROKEN[kind] in reason for reason in reasons), reasons
