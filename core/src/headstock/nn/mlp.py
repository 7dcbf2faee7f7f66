"""The gated feed-forward part (SwiGLU and GeGLU, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.spi import Activation, ClampedGate

# Found once: finding a member of an Enum is felt in a step of one token on a CPU.
_SILU = Activation.SILU


def activate_and_mul(gate_up: Tensor, activation: Activation | ClampedGate = _SILU) -> Tensor:
    """The activation of the first half, times the second half, or as the gate says.

    gate_up: [..., 2 * n]    returns: [..., n]
    """
    gate, up = gate_up.chunk(2, -1)
    # The product is in place, silu is not: in place it takes 5.6 us for 3.5 on a CPU.
    if activation is _SILU:
        return F.silu(gate).mul_(up)
    if isinstance(activation, ClampedGate):
        gate, limit = gate.clamp(max=activation.limit), activation.limit
        up = up.clamp(-limit, limit)
        return torch.sigmoid(gate * activation.slope).mul_(gate).mul_(up.add_(1))
    approximate = "tanh" if activation is Activation.GELU_TANH else "none"
    return F.gelu(gate, approximate=approximate).mul_(up)
