"""The attention backend `trtllm`: TensorRT-LLM's kernels over pages, for Hopper and Blackwell."""

from __future__ import annotations

from headstock_trtllm.plugin import spec

__all__ = ["spec"]
