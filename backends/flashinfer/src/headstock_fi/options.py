"""The options of `fi`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, in_, instance_of

CUDA_CORE_RATIOS = (1, 2, 3, 4, 6, 8)
"""Query heads per KV head for which the library has a decode kernel on CUDA cores."""


@frozen(kw_only=True)
class FlashInferOptions:
    """Which of the library's kernels are used.

    `prefill`: FlashAttention-2 or -3 templates for prompts; auto: as the library chooses for the
        device and the types.
    `tensor_cores`: whether decode uses them; auto: when several query heads share a KV head. They
    are always used for head ratios without a CUDA-core kernel.
    `workspace_mb`: minimum room for partial results, MiB; larger shapes take what they need.
    """

    prefill: Literal["auto", "fa2", "fa3"] = field(
        default="auto", validator=in_(("auto", "fa2", "fa3"))
    )
    tensor_cores: Literal["auto", "on", "off"] = field(
        default="auto", validator=in_(("auto", "on", "off"))
    )
    workspace_mb: int = field(default=128, validator=[instance_of(int), ge(16)])

    def use_tensor_cores(self, ratio: int) -> bool:
        """Whether decode with this number of query heads per KV head uses tensor cores."""
        if ratio not in CUDA_CORE_RATIOS:
            return True
        # With two query heads per KV head on an H200, 256 rows take 211 us on tensor cores and 244
        # on CUDA cores; one row takes 8.0 and 7.7.
        return ratio > 1 if self.tensor_cores == "auto" else self.tensor_cores == "on"
