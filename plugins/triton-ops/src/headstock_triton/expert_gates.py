"""What experts make of gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton.language as tl
from attrs import frozen
from triton.language.extra import libdevice

from headstock.spi import Activation, ClampedGate
from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED

SILU, GELU, GELU_TANH, CLAMPED = (tl.constexpr(number) for number in range(4))
_NUMBERS: Mapping[Activation, int] = MappingProxyType(
    {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
)


@frozen
class ExpertGate:
    """Which function it is, as kernels know it, and the numbers of a `ClampedGate`."""

    number: int = 0
    limit: float = 0.0
    slope: float = 1.0

    @classmethod
    def of(cls, activation: Activation | ClampedGate) -> ExpertGate:
        """That of a model or of its experts."""
        if isinstance(activation, ClampedGate):
            return cls(3, activation.limit, activation.slope)
        return cls(_NUMBERS[activation])


PLAIN_GATE = ExpertGate()


@device_function
def _erf(x):
    if INTERPRETED:
        return tl.erf(x)
    return libdevice.erf(x)


@device_function
def apply_gate(gate, up, GATE: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """The function of the gate times up, in float32."""
    if GATE == CLAMPED:
        # Comparisons that are false for NaN, which stays.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    elif GATE == GELU:
        result = 0.5 * gate * (1.0 + _erf(gate * 0.7071067811865476)) * up
    elif GATE == GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-inner)) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result
