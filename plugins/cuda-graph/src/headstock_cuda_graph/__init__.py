"""The runner `cudagraph`: decode steps replayed as CUDA graphs."""

from __future__ import annotations

from headstock_cuda_graph.plugin import spec

__all__ = ["spec"]
