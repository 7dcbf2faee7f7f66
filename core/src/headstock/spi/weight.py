"""Weights: parameters in the form that operations use, and the formats that checkpoints pack."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import instance_of

if TYPE_CHECKING:
    from torch import Tensor


class WeightKind(Enum):
    """What a stored number is. FP8_E4M3: 8 bits with 4 of exponent, to be multiplied by a scale."""

    FP8_E4M3 = "fp8_e4m3"


@frozen(kw_only=True)
class WeightFormat:
    """How a tensor is packed whose numbers are not floating ones as they stand.

    group: the rows and columns that share a scale, the last of each perhaps fewer; None where one
        scale is for all
    """

    kind: WeightKind = field(validator=instance_of(WeightKind))
    group: tuple[int, int] | None = None


@frozen(kw_only=True, eq=False)
class Weight:
    """One parameter; `bias` goes with a linear map. `Ops.prepare` may make a subclass of it.

    tensor: as its ParamSpec says, or values as `format` packs them
    scales: None, or those of the format: [..., rows of groups, columns of groups], or one number
    format: None for a tensor that is what it says
    bias: [out] or None
    """

    tensor: Tensor
    scales: Tensor | None = None
    format: WeightFormat | None = None
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds; a subclass that holds more counts it here."""
        tensors = (self.tensor, self.scales, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


Params = Mapping[str, Weight]
