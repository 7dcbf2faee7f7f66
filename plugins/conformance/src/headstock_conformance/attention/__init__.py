"""Attention backends: cases, their reference attention, and comparisons."""

from headstock_conformance.attention.cases import (
    MAX_ROWS,
    MAX_SEQ_LEN,
    QUERY,
    AttentionCase,
    add_sinks,
    around,
    context_of,
    in_8_bits,
    in_second_group,
    make,
    make_latent,
    query,
    step_of,
)
from headstock_conformance.attention.comparison import TOLERANCE, attend, check, compare
from headstock_conformance.attention.reference import expected, row_attention
from headstock_conformance.attention.replays import check_replays, replayed_prompts

__all__ = [
    "MAX_ROWS",
    "MAX_SEQ_LEN",
    "QUERY",
    "TOLERANCE",
    "AttentionCase",
    "add_sinks",
    "around",
    "attend",
    "check",
    "check_replays",
    "compare",
    "context_of",
    "expected",
    "in_8_bits",
    "in_second_group",
    "make",
    "make_latent",
    "query",
    "replayed_prompts",
    "row_attention",
    "step_of",
]
