"""The torch operations with weights packed for oneDNN, for CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Batch, Params, ParamSpec, Role, Weight

_TYPICAL_TOKENS = 32
"""The batch that the packing is laid out for; it serves any."""

_MAX_EXACT_ROWS = 32
"""Products of more rows are rounded up; below, decoding would feel each row that is added."""

KERNEL_BYTES = 640 << 10
"""Bytes that oneDNN keeps for one shape of product: its description and its compiled code.

Measured with oneDNN 3.12 on AVX-512, where it is 570 KiB for any number of rows.
"""

_MULTIPLIED = frozenset((Role.LINEAR, Role.HEAD, Role.ROUTER))

_LEAST_PACKED_BYTES = 512 << 10
"""Bytes of a weight below which it stays plain: a packed product takes 11 us before it begins.

One row by a map of 256 x 256 takes 5 us plain and 17 packed, 32 rows 34 and 43; from 512 x 512 on,
packed is faster for all but few rows. And each shape of packed maps may keep 45 MiB of kernels.
"""


@frozen(kw_only=True, eq=False)
class LengthWeight(Weight):
    """A norm's weight times sqrt(n), for norms by length."""


class OneDnnOps(TorchOps):
    """`TorchOps` with the weights of linear maps packed once, at load, instead of in every product.

    Small maps stay plain. Norms are by length, in fewer operations, so their weights are prepared
    as well.
    least_packed_bytes: of a weight that is packed
    """

    def __init__(self, least_packed_bytes: int = _LEAST_PACKED_BYTES) -> None:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            raise CannotRun("this build of torch has no oneDNN; set ops (--ops) to torch")
        self.least_packed_bytes = least_packed_bytes
        self.floors: dict[tuple[int, float], Tensor] = {}

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """Linear maps packed unless small, weights of norms times sqrt(n); others as they are."""
        plain = weight.tensor
        # For norms by length: 4.5 us for a row of 256, where `F.rms_norm` takes 9.7.
        if spec.roles <= {Role.NORM, Role.HEAD_NORM}:
            return LengthWeight(tensor=plain * plain.shape[-1] ** 0.5)
        # A tied embedding is looked up too, which needs the plain weight.
        if not spec.roles <= _MULTIPLIED or plain.nbytes < self.least_packed_bytes:
            return weight
        # Once, at load: `F.linear` has the BLAS library lay a plain weight out anew in every
        # product.
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, _TYPICAL_TOKENS)
        return Weight(tensor=packed, bias=weight.bias)

    def count_kernel_bytes(self, params: Params, max_tokens: int) -> int:
        """The most bytes that oneDNN keeps for products of these parameters."""
        shapes = {
            (weight.tensor.shape, weight.tensor.dtype, weight.bias is None)
            for weight in params.values()
            if weight.tensor.is_mkldnn
        }
        sizes = {round_rows(rows) for rows in range(1, max_tokens + 1)}
        return len(shapes) * len(sizes) * KERNEL_BYTES

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """`x` divided by its length, at least sqrt(n * eps), times the weight.

        Both have the sqrt(n) that a mean would have.
        """
        # A weight without the role of a norm was not prepared for one.
        if not isinstance(weight, LengthWeight):
            return super().rms_norm(x, weight, eps)
        # 4.5 us for one row of 256. A mean by `vector_norm` and `rsqrt_` takes 5.7, a sum of
        # squares by `baddbmm` 6.5. Written out in both norms: a call is felt in small steps.
        floor = self.floors.get((x.shape[-1], eps))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        length.hypot_(self._make_floor(x, eps) if floor is None else floor)
        return x.div(length).mul_(weight.tensor)

    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """As `rms_norm`, each head by itself."""
        if not isinstance(weight, LengthWeight):
            return super().head_norm(x, weight, eps)
        floor = self.floors.get((x.shape[-1], eps))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        length.hypot_(self._make_floor(x, eps) if floor is None else floor)
        return x.div(length).mul_(weight.tensor)

    def _make_floor(self, x: Tensor, eps: float) -> Tensor:
        """Make and keep the length of a row of `x` whose mean square is `eps`."""
        # Kept, because making a tensor takes as long as using it.
        n = x.shape[-1]
        floor = self.floors[n, eps] = torch.tensor((n * eps) ** 0.5)
        return floor

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b, by the packed weight where it is one."""
        if not weight.tensor.is_mkldnn:
            return F.linear(x, weight.tensor, weight.bias)
        rows = x.shape[0]
        padding = round_rows(rows) - rows
        if padding:
            # Each new number of rows would cost a compiled kernel of 570 KiB.
            x = torch.cat((x, x.new_zeros(padding, x.shape[1])))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight.tensor, weight.bias, "none", [], ""
        )
        return out[:rows] if padding else out


def round_rows(rows: int) -> int:
    """`rows` where they are few, else rounded up to 8 sizes between one power of two and the next.

    oneDNN compiles a kernel for each number of rows and keeps it. Steps have any number, so without
    rounding the process would grow by a kernel a step until thousands are there.
    """
    if rows <= _MAX_EXACT_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step
