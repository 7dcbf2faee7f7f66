"""A second model in the same process, which a proposer asks what it would say next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headstock.config import EngineConfig
from headstock.outputs import Update
from headstock.sampling_params import SamplingParams
from headstock.scheduler import Request
from headstock.spi import DraftModel, ModelConfig
from headstock.spi.arrays import Ints

_GREEDY = SamplingParams(temperature=0.0)


class SteppedEngine(Protocol):
    """What is used of an `Engine`."""

    model: ModelConfig

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a request."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to do."""
        ...

    def submit(self, request: Request, *, stream_tokens: bool = True) -> None:
        """Queue a request."""
        ...

    def step(self) -> tuple[Update, ...]:
        """Run a step."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


class EngineModel(DraftModel):
    """A model served by an engine of its own, whose prefix cache keeps what rows have in common
    from one call to the next.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine

    @property
    def vocab(self) -> int:
        """How many token ids it has."""
        return self._engine.model.vocab

    def continue_rows(self, tokens: Sequence[Ints], counts: Ints) -> list[Ints]:
        """See `DraftModel.continue_rows`."""
        engine, found = self._engine, [list[int]() for _ in tokens]
        for number, (row, count) in enumerate(zip(tokens, counts.tolist(), strict=True)):
            # A row that outgrows this model, or says what it has no token for, gets nothing.
            room = min(count, engine.max_seq_len - len(row))
            if room > 0 and int(row.max()) < self.vocab:
                request = Request(
                    id=str(number), prompt=row.copy(), max_tokens=room, params=_GREEDY
                )
                engine.submit(request, stream_tokens=False)
        while engine.has_work:
            for update in engine.step():
                found[int(update.id)] += update.tokens
        return [np.array(each, np.int32) for each in found]

    def close(self) -> None:
        """Free the device."""
        self._engine.close()


def open_draft_model(
    make_engine: Callable[[EngineConfig], SteppedEngine],
    config: EngineConfig,
    name: str,
    settings: Mapping[str, Any],
) -> EngineModel:
    """Serve a second model beside that of `config`.

    settings: of its engine; the device, the rows and the length are those of `config`, others the
        defaults
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """
    shared: dict[str, Any] = {
        "model": name,
        "device": config.device,
        "max_running_requests": config.max_running_requests,
        "max_seq_len": config.max_seq_len,
        "max_seq_len_or_less": True,
        "load_format": config.load_format,
    }
    return EngineModel(make_engine(EngineConfig(**(shared | dict(settings)))))
