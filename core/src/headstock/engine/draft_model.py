"""A second model in the same process, which a proposer asks what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headstock.sampling_params import SamplingParams
from headstock.scheduler import Request
from headstock.spi import DraftModel
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.engine.engine import Engine

_GREEDY = SamplingParams(temperature=0.0)


class EngineModel(DraftModel):
    """A model served by an engine of its own, whose prefix cache keeps what rows have in common
    from one call to the next.
    """

    def __init__(self, engine: Engine) -> None:
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
