"""Hidden states of a prompt as one vector, over the chunks in which the prompt is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.spi import Batch, Pooling


def pool_hidden(hidden: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    """Pool each row's tokens up to this step's last.

    hidden: [tokens, hidden], of the batch
    returns: [pooled, hidden] float32; NaN or infinite where a hidden state that it is made of is
    writes: pooling.sums
    """
    ends = batch.query_start[1:].long()[pooling.rows]
    last = hidden[ends - 1].float()
    if pooling.sums is None:
        return last
    # Each row's sum has its own tokens alone, so NaN stays in its row, and it is the same beside
    # any others. Unsafe: the check of the offsets would wait for the device.
    sums = torch.segment_reduce(
        hidden.float(), "sum", offsets=batch.query_start.long(), axis=0, unsafe=True
    )[pooling.rows]
    row_ids, starts = batch.row_ids[pooling.rows], batch.starts[pooling.rows]
    # Not a product by 0: what an earlier request left behind may be NaN.
    sums += pooling.sums[row_ids].masked_fill((starts == 0)[:, None], 0.0)
    pooling.sums[row_ids] = sums
    begins = batch.query_start.long()[pooling.rows]
    return torch.where(pooling.is_mean[:, None], sums / (starts + ends - begins)[:, None], last)
