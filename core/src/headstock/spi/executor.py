"""Executors: they start the ranks that compute one model together, and connect them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@frozen(kw_only=True)
class ExecutorSpec(PluginSpec):
    """An executor as its entry point returns it.

    `implementation` names what is called on rank 0 with an `EngineConfig`, and with an instance of
    the options class if the spec names one. It starts `config.tp - 1` other ranks, returns the
    `Ranks` and raises CannotRun where it cannot. Where something else has started the ranks, it is
    called on each of them.

    It is called before this process imports torch, which takes seconds: where `implementation`
    imports none either, the processes that it starts do so at the same time.
    """


@frozen(kw_only=True, eq=False)
class PeerMemory:
    """Memory of each rank that the devices of all ranks write to.

    own: [size] uint8, that of this rank
    addresses: [count] int64 on the same device, where its kernels reach the memory of each rank
    abandoned: [1] int32 on the same device, which kernels read: not 0 once a rank has gone, whose
        numbers no kernel waits for any more
    """

    own: Tensor
    addresses: Tensor
    abandoned: Tensor


class Collectives:
    """What the devices of all ranks compute together.

    Every rank calls the same methods in the same order, with tensors of the same shapes, and gets
    the same bits. This class is that of a model on one rank.

    index: of this rank
    count: of ranks
    """

    index: int = 0
    count: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over ranks; `x` may be written."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of all ranks, joined on the last dimension in the order of ranks."""
        return x

    def share_memory(self, size: int) -> PeerMemory | None:
        """Memory of `size` bytes on each rank, for kernels that reach other ranks themselves.

        returns: None, on all ranks, where a device cannot reach another one's memory
        """
        return None


ALONE = Collectives()
"""The collectives of a model on one rank."""


class Ranks(ABC):
    """The ranks of a model, as one of them sees them; the methods are called alike on all ranks.

    index: of this rank; rank 0 has the engine
    count: how many there are
    """

    index: int
    count: int

    @abstractmethod
    def begin(self) -> None:
        """Take what the others' start needs of torch; called once, before the other methods.

        raises: CannotRun
        """

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what others pass does not matter.

        value: as JSON has it
        """

    @abstractmethod
    def take_least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The least of each number over ranks."""

    @abstractmethod
    def join(self, device: torch.device) -> Collectives:
        """Connect the devices of all ranks, on a thread beside that which loads weights."""

    @abstractmethod
    def collect(self, value: Any) -> Sequence[Any]:
        """On rank 0, the values of the other ranks in their order; elsewhere, nothing.

        value: as JSON has it
        """

    # Core's own types are not part of the contract: a plugin that carries them follows core's
    # versions. One that only starts processes can leave that to `headstock-multiprocess`.
    @abstractmethod
    def connect(self, executor: Any) -> Any:
        """On rank 0, an executor that has the other ranks run its plans too; there, itself.

        executor: a `headstock.execution.abstract_executor.Executor`
        """

    @abstractmethod
    def connect_masks(self, masks: Any) -> Any:
        """On each rank, a source of the masks of its part of the vocabulary, which rank 0 fills.

        masks: a `headstock.execution.token_masks.WholeMaskSource`; None where answers follow no
            grammar
        """

    @abstractmethod
    def follow(self, executor: Any) -> None:
        """On another rank than 0, run rank 0's plans on an executor until rank 0 closes."""

    @abstractmethod
    def explain(self, error: BaseException) -> BaseException:
        """The error of the rank that failed first, which may be why this one raised `error`."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
