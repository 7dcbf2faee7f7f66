"""What an engine asks of a part before weights load."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from headstock.spi.model_config import ModelConfig
from headstock.spi.weight import WeightFormat


@frozen(kw_only=True, eq=False)
class PartQuery:
    """What an engine asks of a part of any kind; of attention backends `AttentionQuery` asks.

    model: the model's configuration
    dtype, kv_dtype: of weights and activations, and of the KV pool, by torch's names
    formats: how matrices are packed, as far as config.json or `--quant` says, of which loading
        makes plain what the operations do not take; none for plain ones
    contiguous: each sequence has one region instead of pages
    max_rows, max_batch_tokens: the most of a step
    max_seq_len: the longest that a sequence may be asked to get
    parts: the parts that were chosen before this one, name by kind
    """

    model: ModelConfig
    dtype: str
    kv_dtype: str
    formats: tuple[WeightFormat, ...]
    contiguous: bool
    max_rows: int
    max_batch_tokens: int
    max_seq_len: int
    parts: Mapping[str, str] = field(factory=dict)
