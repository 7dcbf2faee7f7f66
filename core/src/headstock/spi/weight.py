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
    """What a stored number is, to be multiplied by a scale.

    FP8_E4M3: 8 bits with 4 of exponent
    FP4_E2M1: 4 bits with 2 of exponent; two lie in a byte, the first one in its lower half
    INT8: -128 to 127, less the zero of its group, where it has one
    INT4: 0 to 15, less the zero of its group, or 8; two lie in a byte as of FP4_E2M1
    """

    FP8_E4M3 = "fp8_e4m3"
    FP4_E2M1 = "fp4_e2m1"
    INT8 = "int8"
    INT4 = "int4"


@frozen(kw_only=True)
class WeightFormat:
    """How a tensor is packed whose numbers are not floating ones as they stand.

    group: the rows and columns that share a scale, the last of each perhaps fewer; None where one
        scale is for all
    has_zeros: whether each group has a zero of its own
    """

    kind: WeightKind = field(validator=instance_of(WeightKind))
    group: tuple[int, int] | None = None
    has_zeros: bool = False


@frozen(kw_only=True, eq=False)
class Weight:
    """One parameter; `bias` goes with a linear map. `Ops.prepare` may make a subclass of it.

    tensor: as its ParamSpec says, or values as `format` packs them
    scales: None, or those of the format: [..., rows of groups, columns of groups], or one number
    format: None for a tensor that is what it says
    bias: [out] or None
    zeros: of the format's groups, as `scales` and in the numbers of `tensor`; int8 or uint8
    order: [columns], which column of the map is stored at each place, so that those of a group lie
        together; None where they do
    """

    tensor: Tensor
    scales: Tensor | None = None
    format: WeightFormat | None = None
    bias: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds; a subclass that holds more counts it here."""
        tensors = (self.tensor, self.scales, self.bias, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


Params = Mapping[str, Weight]
