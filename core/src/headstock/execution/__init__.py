"""From a plan to the device and back: batches, buffers, sampling inputs and executors."""

from __future__ import annotations

__all__ = [
    "abstract_executor",
    "attention_router",
    "batch",
    "buffers",
    "executor",
    "grouped_attention",
    "readback",
    "row_tables",
    "sampling_inputs",
    "threaded",
    "token_masks",
]
