"""How a kernel exchanges numbers with the same kernel on the other ranks, without a barrier.

Each rank writes its numbers into a slot of every other rank, and reads its own slots until they are
full. An empty place of 16 bits holds -0.0, one of 32 bits two of them (as a float32, -4.6e-41), and
0.0 is sent in their place, so that a number itself says that it has arrived. Integers may have any
bits: they are sent in 64, with a bit that no empty place has. There are three sets of slots, used
in turns. A launch that reads one set empties the set of the launch before. A peer
writes there again two launches later, which it begins only after it has had the numbers of the
launch between; those were sent after the set was emptied.

All ranks launch the same kernels on the same shapes in the same order. A program always exchanges
the same places, of which a launch may leave out the last, and counts its own launches.
"""

from __future__ import annotations

import triton.language as tl

from headstock_triton.device_function import device_function

SETS = 3
"""Sets of slots that are used in turns."""
_SETS = tl.constexpr(SETS)
EMPTY = -(1 << 15)
"""What each 16 bits of an empty place hold, as an integer."""
_EMPTY_16 = tl.constexpr(EMPTY)
_EMPTY_32 = tl.constexpr((EMPTY << 16) + (1 << 15))
_EMPTY_64 = tl.constexpr(((EMPTY << 16) + (1 << 15)) * (1 << 32) + (1 << 31) + (1 << 15))
_SENT = tl.constexpr(1 << 32)
"""The bit of an integer that has arrived."""
_TRIES = tl.constexpr(1 << 10)
"""Reads of empty places, under a millisecond, after which a kernel asks whether a rank has gone."""


@device_function
def mark(x):
    """Integers of 32 bits as they are sent; their lower 32 bits are what arrives."""
    return (x.to(tl.int64) & (_SENT - 1)) | _SENT


@device_function
def send(x, addresses, place, mask, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write numbers to the memory of all other ranks.

    x: [block] floats of 16 or 32 bits, or integers made by `mark`
    place: [block], where, counted in such numbers from the begin of each rank's memory
    returns: what the others get
    """
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    words: tl.constexpr = tl.int16 if bits == 16 else (tl.int32 if bits == 32 else tl.int64)
    empty: tl.constexpr = _EMPTY_16 if bits == 16 else (_EMPTY_32 if bits == 32 else _EMPTY_64)
    word = x.to(words, bitcast=True)
    word = tl.where(word == empty, tl.zeros_like(word), word)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            memory = tl.load(addresses + peer).to(tl.pointer_type(words))
            tl.store(tl.multiple_of(memory, 16) + place, word, mask)
    return word.to(x.dtype, bitcast=True)


@device_function
def receive(own, place, mask, addresses, WORLD: tl.constexpr, dtype: tl.constexpr):
    """The numbers that a peer writes, once all have arrived; any once a rank has gone.

    own: the memory of this rank, as integers of the width of `dtype`
    addresses: [WORLD + 1], of which the last is that of the flag that says that a rank has gone
    """
    bits: tl.constexpr = dtype.primitive_bitwidth
    empty: tl.constexpr = _EMPTY_16 if bits == 16 else (_EMPTY_32 if bits == 32 else _EMPTY_64)
    word = tl.load(own + place, mask, other=0, volatile=True)
    waits = tl.max((word == empty).to(tl.int32), 0)
    tries = 0
    while waits > 0:
        word = tl.load(own + place, mask, other=0, volatile=True)
        tries += 1
        gone = 0
        if tries % _TRIES == 0:
            flag = tl.load(addresses + WORLD).to(tl.pointer_type(tl.int32))
            gone = tl.load(flag, volatile=True)
        # In the maximum, because threads may see the flag change at different times.
        waits = tl.max(((word == empty) & (gone == 0)).to(tl.int32), 0)
    return word.to(dtype, bitcast=True)


@device_function
def clear(own, place, mask):
    """Empty places of this rank's memory."""
    words: tl.constexpr = own.dtype.element_ty
    bits: tl.constexpr = words.primitive_bitwidth
    empty: tl.constexpr = _EMPTY_16 if bits == 16 else (_EMPTY_32 if bits == 32 else _EMPTY_64)
    tl.store(own + place, tl.full(place.shape, empty, words), mask)


@device_function
def sum_over_ranks(
    x, addresses, own, place, size, epoch, mask, whole, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """The sum of `x` over ranks, in their order, in float32.

    place: [block], of the numbers in a slot
    size: numbers of a slot
    epoch: of this launch, counted by the program to which these places belong
    mask: [block], the places that this launch uses
    whole: [block], those that any launch does
    writes: this rank's slots of the launch before, which are emptied
    """
    slots = (epoch % _SETS) * WORLD
    x = send(x, addresses, (slots + RANK) * size + place, mask, RANK, WORLD)
    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            total += x.to(tl.float32)
        else:
            total += receive(
                own, (slots + peer) * size + place, mask, addresses, WORLD, x.dtype
            ).to(tl.float32)
    before = ((epoch + 2) % _SETS) * WORLD
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            clear(own, (before + peer) * size + place, whole)
    return total
