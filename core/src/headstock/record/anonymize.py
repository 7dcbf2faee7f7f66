"""Hashes instead of tokens: they keep what a schedule depends on, and nothing else.

docs/decisions/0010-recordings.md weighs them against a table of prefixes and a cipher.
"""

from __future__ import annotations

import hashlib

import numpy as np
from attrs import evolve

from headstock.scheduler import Arrived, Event, Limits, Plan, Request, RequestState, Sampled
from headstock.spi.arrays import Ints

STOP = 1 << 30
"""The first stop id of each request is written as STOP, its second as STOP + 1, and so on. Hashes
are smaller, so no hash is taken for a stop id.
"""


class TokenAnonymizer:
    """Replaces the tokens of a run by hashes, step by step.

    The last two tokens of a page become hashes of the namespace and all tokens up to them; every
    other token becomes 0. Equal prefixes get equal hashes, others differ except for one pair in
    2**60; a cache policy asks for no more. In contiguous mode each token counts as a page. A token
    that ends its request becomes the number of that stop id. The hash has a secret key that is
    never written, so that tokens cannot be found by hashing guesses.
    """

    # A renaming of the vocabulary would keep as much of the schedule, but it is a substitution
    # cipher: in a long recording the most frequent numbers are the most frequent words.

    def __init__(self, limits: Limits, secret: bytes) -> None:
        rows, self.unit = limits.max_rows, 1 if limits.max_regions else limits.page_size
        self.secret = secret
        self.admission_ids = np.zeros(rows, np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.stop_from = np.zeros(rows, np.int64)  # a stop id counts from this length on
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.tails = np.zeros((rows, self.unit), np.int32)  # tokens of each row's last page
        self.prefix_hashes = [b""] * rows  # hash of all pages before the last

    def anonymize_event(self, event: Event) -> Event:
        """Return the event with tokens, stop ids and names replaced."""
        match event:
            case Arrived(request):
                return Arrived(self._anonymize_request(request))
            case Sampled():
                return evolve(
                    event, tokens=self.anonymize_samples(event), drafts=np.zeros_like(event.drafts)
                )
        return event

    def anonymize_plan(self, plan: Plan) -> Plan:
        """Return the plan with drafts replaced, as those of the events that they come from."""
        return evolve(plan, drafts=np.zeros_like(plan.drafts)) if len(plan.drafts) else plan

    def _anonymize_request(self, request: Request) -> Request:
        """Return the request with its prompt, stop ids and names replaced."""
        space = request.namespace
        return evolve(
            request,
            prompt=self.anonymize_prompt(request.prompt, space)[0],
            stop_ids=tuple(range(STOP, STOP + len(request.stop_ids))),
            namespace=space and self._hash(b"namespace", space.encode()).hex()[:8],
            # Schedulers tell users apart, so hashes of two must differ: 64 bits of each.
            extra_args=None,  # they may hold texts, and the schedule does not depend on them
            user=request.user and self._hash(b"user", request.user.encode()).hex()[:16],
            # Hashed again: guessed arguments would otherwise be confirmed by their digests.
            variant=request.variant and self._hash(b"variant", request.variant.encode()).hex()[:16],
            adapter=request.adapter and self._hash(b"adapter", request.adapter.encode()).hex()[:16],
        )

    def add_rows(self, plan: Plan, admitted: tuple[RequestState, ...]) -> None:
        """Remember the requests that the plan admitted; their samples come in later events."""
        admission_ids = (
            dict(zip(plan.rows.tolist(), plan.admission_ids.tolist(), strict=True))
            if admitted
            else {}
        )
        for row, entry in zip(plan.new_row_ids.tolist(), admitted, strict=True):
            request, rest = entry.request, len(entry.tokens) % self.unit
            self.admission_ids[row], self.num_tokens[row] = (
                admission_ids.get(row, 0),
                len(entry.tokens),
            )
            self.stop_from[row] = len(request.prompt) + request.min_tokens
            self.prefix_hashes[row] = self.anonymize_prompt(entry.tokens, request.namespace)[1]
            self.tails[row, :rest] = entry.tokens[len(entry.tokens) - rest :]
            more = len(request.stop_ids) - self.stop_ids.shape[1]
            if more > 0:
                self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
            self.stop_ids[row] = -1
            self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids

    def anonymize_samples(self, event: Sampled) -> Ints:
        """Return hashes of sampled tokens; 0 for rows that are gone or were never added.

        An inconsistent event, which may be what the scheduler failed on, gets zeros alone.
        """
        counts = np.ones_like(event.rows) if event.counts is None else event.counts
        names = np.zeros(len(event.tokens), np.int32)
        is_row = (event.rows >= 0) & (event.rows < len(self.admission_ids))
        if not is_row.all() or int(counts.sum()) != len(names):
            return names
        starts = np.cumsum(counts) - counts
        live = self.admission_ids[event.rows] == event.admission_ids
        # speculation accepts several tokens of a row: one round for each, all rows together
        for turn in range(int(counts.max(initial=0))):
            at = np.flatnonzero(live & (counts > turn))
            names[starts[at] + turn] = self._anonymize_tokens(
                event.rows[at], event.tokens[starts[at] + turn]
            )
        return names

    def _anonymize_tokens(self, rows: Ints, tokens: Ints) -> Ints:
        """Append a token to each row and return its hash.   rows, tokens, returns: [n]"""
        lengths, names = self.num_tokens[rows], np.zeros(len(rows), np.int64)
        offsets = lengths % self.unit
        self.tails[rows, offsets] = tokens
        self.num_tokens[rows] = lengths + 1
        # Two hashes of 30 bits stand for a page: a token is an int32, and one would collide too
        # often.
        for at in np.flatnonzero(offsets >= self.unit - 2).tolist():
            row, offset = int(rows[at]), int(offsets[at])
            digest = self._hash(self.prefix_hashes[row], self.tails[row, : offset + 1].tobytes())
            names[at] = _short_hash(digest)
            if offset == self.unit - 1:
                self.prefix_hashes[row] = digest
        stops = (self.stop_ids[rows] == tokens[:, None]) & (lengths + 1 >= self.stop_from[rows])[
            :, None
        ]
        return np.where(stops.any(1), STOP + stops.argmax(1), names)

    def anonymize_prompt(self, tokens: Ints, namespace: str) -> tuple[Ints, bytes]:
        """Return hashes of tokens from a sequence's start on, and the hash of its full pages."""
        names, unit = np.zeros(len(tokens), np.int32), self.unit
        data, width = np.ascontiguousarray(tokens, np.int32).tobytes(), 4
        parent = self._hash(b"start", namespace.encode())
        for start in range(0, len(tokens), unit):
            for stop in (start + unit - 1, start + unit):
                if start < stop <= len(tokens):
                    digest = self._hash(parent, data[start * width : stop * width])
                    names[stop - 1] = _short_hash(digest)
            if start + unit <= len(tokens):
                parent = digest
        return names, parent

    def _hash(self, before: bytes, data: bytes) -> bytes:
        """Return the hash of `data` after that of its prefix."""
        return hashlib.blake2b(before + data, key=self.secret, digest_size=16).digest()


def _short_hash(digest: bytes) -> int:
    """Return 30 bits of a hash: a token is an int32, and stop ids take the range above."""
    return int.from_bytes(digest[:4], "little") % STOP
