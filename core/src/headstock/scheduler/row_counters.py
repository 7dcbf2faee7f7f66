"""The per-row counters, and small array functions of the scheduler."""

from __future__ import annotations

import numpy as np

from headstock.spi.arrays import Ints


class RowCounter:
    """The rows of the counter array [counters, rows]; a free row has zeros.

    One array, so that a step clears a row by one write.
    Plain numbers: a member of an IntEnum as an index costs 0.1 us more each time, 4 us a step.
    """

    ACTIVE = 0  # 1 while a request has the row
    ADMISSION_ID = 1  # counted from 1; tells late results of an earlier request
    NUM_TOKENS = 2  # known, placeholder and draft tokens
    NUM_KNOWN = 3  # tokens in the token table
    # tokens whose keys and values are in the pool, or will be once launched steps are done
    NUM_COMPUTED = 4
    NUM_PLACEHOLDERS = 5  # tokens that launched steps will sample
    NUM_PROMPT = 6  # length of the prompt
    LAST_POSITION = 7  # position of the last token that the row may get, which is never computed
    MIN_LEN = 8  # length before which no stop id counts
    NUM_INDEXED = 9  # leading pages that the prefix index holds
    LAST_STEP = 10  # number of the step that the row last ran in, or was admitted in
    WAIT_FOR_SAMPLE = 11  # 1: plan no further before the last sampled token is known
    PROMPT_LOGPROBS = 12  # 1: every prompt position gets logits
    NUM_CACHED = 13  # prompt tokens taken from the index
    PRIORITY = 14  # the request's; higher goes first
    ARRIVAL = 15  # number of the request in the order they came
    NUM_COMPUTED_BEFORE = 16  # tokens computed before the latest plan
    HELD = 17  # 1: as WAIT_FOR_SAMPLE, until the next sampled token
    USER = 18  # number of the request's user, 0 for none
    ADAPTER = 19  # number of its adapter, 0 for none
    ARRIVED_AT = 20  # milliseconds of the clock, modulo 2**32 (see `count_waits`)
    POOLING = 21  # 1: hidden states are pooled instead of being scored; no token is sampled
    NUM_SAVED = 22  # tokens behind which its state was last looked at for a snapshot
    BRANCH = 23  # tokens behind which another prefix parts from its prompt, 0 for none
    LAST_CUT = 24  # tokens of its prompt's last snapshot, 0 for none
    VERIFIED_FROM = 25  # where the step began that verifies its drafts; 0 where it verifies none


NUM_COUNTERS = 26

NONE: Ints = np.zeros(0, np.int32)
"""No rows, pages or tokens."""
NONE.flags.writeable = False


def read_only(array: np.ndarray) -> np.ndarray:
    """Return the array, no longer writeable."""
    array.setflags(write=False)
    return array


def any_set(mask: np.ndarray) -> bool:
    """Return whether any entry is set; at these sizes four times as fast as `mask.any()`."""
    return bool(np.count_nonzero(mask))


def all_set(mask: np.ndarray) -> bool:
    """Return whether all entries of the mask are set."""
    return int(np.count_nonzero(mask)) == mask.size


def find_decode_rows(counters: Ints) -> np.ndarray:
    """Return which rows compute only what was sampled or drafted last, [rows] bool.

    A row that computes its output again, after preemption, is as a prompt: no client waits for its
    next token more than for a first one.
    counters: [counters, rows]
    """
    prompt, known = counters[RowCounter.NUM_PROMPT], counters[RowCounter.NUM_KNOWN]
    decoding: np.ndarray = counters[RowCounter.NUM_COMPUTED] >= np.maximum(prompt, known - 1)
    return decoding


def is_special(counters: Ints) -> Ints:
    """Return which rows a step must look at one by one, as not all score their last token alone.

    counters: [counters, ...]    returns: [...]
    """
    special: Ints = (
        counters[RowCounter.WAIT_FOR_SAMPLE]
        | counters[RowCounter.PROMPT_LOGPROBS]
        | counters[RowCounter.POOLING]
    )
    return special


def indices(mask: np.ndarray) -> Ints:
    """Return the indices of the set entries; five times as fast as `np.flatnonzero(mask)` here.

    mask: [n]    returns: [set entries] int64
    """
    return mask.nonzero()[0]


def wrap_milliseconds(milliseconds: int) -> int:
    """Return the time modulo 2**32, as an int32 holds it: it wraps around after 49 days."""
    return (milliseconds + 2**31) % 2**32 - 2**31


def count_waits(counters: Ints, milliseconds: int) -> Ints:
    """Return for how long each row's request has been here, [rows] int32 milliseconds.

    A time of more than 24 days has no place in 32 bits and reads as 0.
    """
    waits: Ints = wrap_milliseconds(milliseconds) - counters[RowCounter.ARRIVED_AT].astype(np.int64)
    waits = np.maximum(waits.astype(np.int32), 0)
    waits *= counters[RowCounter.ACTIVE]
    return waits


def count_drafts(counters: Ints) -> Ints:
    """Return how many drafts each row has to verify, or verifies now, [rows] int32."""
    drafts: Ints = counters[RowCounter.NUM_TOKENS] - counters[RowCounter.NUM_KNOWN]
    drafts -= counters[RowCounter.NUM_PLACEHOLDERS]
    return drafts
