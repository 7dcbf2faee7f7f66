"""The ranks of an engine: one by itself, or those that an executor plugin starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, shorten
from headstock.selection.executors import select_executor
from headstock.spi import ALONE, Collectives, Ranks

if TYPE_CHECKING:
    # Ranks are started before torch is imported.
    import torch


class OneRank(Ranks):
    """The only rank of a model."""

    index = 0
    count = 1

    def begin(self) -> None:
        """See `Ranks.begin`."""

    def share(self, value: Any) -> Any:
        """See `Ranks.share`."""
        return value

    def collect(self, value: Any) -> Sequence[Any]:
        """See `Ranks.collect`."""
        return ()

    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Ranks.take_least`."""
        return tuple(numbers)

    def join(self, device: torch.device) -> Collectives:
        """See `Ranks.join`."""
        return ALONE

    def connect(self, executor: Any) -> Any:
        """See `Ranks.connect`."""
        return executor

    def connect_masks(self, masks: Any) -> Any:
        """See `Ranks.connect_masks`."""
        return masks

    def follow(self, executor: Any) -> None:
        """See `Ranks.follow`."""

    def explain(self, error: BaseException) -> BaseException:
        """See `Ranks.explain`."""
        return error

    def close(self) -> None:
        """See `Ranks.close`."""


def start_ranks(config: EngineConfig) -> Ranks:
    """Start the ranks of an engine.

    raises: UsageError, UnknownPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    spec = select_executor(config)
    if spec is None:
        return OneRank()
    options = () if spec.options is None else (registry.make_options(spec, config.opt),)
    ranks: Ranks = registry.make_part(spec, Ranks, config, *options, expected=(CannotRun,))
    return ranks


@contextmanager
def started_ranks(config: EngineConfig) -> Iterator[Ranks]:
    """Start the ranks of an engine that is made in this block, and end them after it.

    raises: as `start_ranks`
    """
    ranks = start_ranks(config)
    try:
        yield ranks
    finally:
        ranks.close()


def check_same(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Check that a rank has decided as rank 0 has.

    mine: the decisions of this rank, by what they are about
    raises: CannotRun, naming the first that differs
    """
    wanted: Mapping[str, str] = ranks.share(dict(mine))
    for name in sorted({*mine, *wanted}):
        if mine.get(name) != wanted.get(name):
            raise CannotRun(
                f"{name}: expected {shorten(wanted.get(name, 'nothing'), 200)}, as rank 0 has, got "
                f"{shorten(mine.get(name, 'nothing'), 200)}; install the same versions for all "
                "ranks"
            )
