"""A toy model for the scheduler's tests, and a device that runs it: the next token is a hash of the
whole history.

Any mistake of the scheduler shows as a wrong token, which can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field

from headstock.scheduler import (
    Limits,
    Plan,
    Pooled,
    Request,
    RequestState,
    Sampled,
)
from headstock.spi import (
    KVGroup,
    LayoutKind,
)

VOCAB = 50

PRIME = 1_000_003
POWERS = np.array([pow(31, exponent, PRIME) for exponent in range(4096)], np.int64)


def next_token(history: Sequence[int] | np.ndarray) -> int:
    """The toy model: a polynomial in all tokens, so that order counts too."""
    return hash_tokens(history) % VOCAB


def hash_tokens(history: Sequence[int] | np.ndarray) -> int:
    """The polynomial in all tokens."""
    tokens = np.asarray(history, np.int64)
    return int(((tokens + 7) * POWERS[: len(tokens)][::-1]).sum() % PRIME)


def is_state(group: KVGroup) -> bool:
    """Whether the group keeps a state."""
    return group.layout.kind is LayoutKind.STATE


def list_saves(plan: Plan, row: int) -> dict[int, dict[int, int]]:
    """By group and number of tokens, the pages to which a plan saves a row's states."""
    found: dict[int, dict[int, int]] = {}
    for group, whose, count, page in plan.saves.reshape(-1, 4).tolist():
        if whose == row:
            found.setdefault(group, {})[count] = page
    return found


def hash_prefixes(tokens: Sequence[int] | np.ndarray) -> list[int]:
    """The toy's hidden states: the hash of each prefix."""
    hashes, last = [], 0
    for token in np.asarray(tokens, np.int64).tolist():
        last = (last * 31 + token + 7) % PRIME
        hashes.append(last)
    return hashes


def alone(request: Request) -> list[int]:
    """Return the output of a request that runs alone, or the sum that it pools."""
    if request.pooling:
        hashes = hash_prefixes(request.prompt)
        return [sum(hashes) if request.pooling == "mean" else hashes[-1]]
    history = [int(token) for token in request.prompt]
    while len(history) < request.max_len:
        token = next_token(history)
        history.append(token)
        if token in request.stop_ids and len(history) - len(request.prompt) >= request.min_tokens:
            break
    return history[len(request.prompt) :]


@define
class ToyDevice:
    """Runs plans against a pool of tokens instead of keys and values, and checks its reads.

    It keeps a token table of its own, as a device does: sampled tokens are in it before the
    scheduler sees them.

    A token's slot holds the token and its position; "attention" gathers the row's context through
    the page table. A page that was allocated twice or freed too early yields a wrong history. A
    state page holds the hash of the row's tokens and their number.

    sums: by row, of the hidden states that a mean is made of
    pooled: by admission id, the pooled sum of a request
    pooled_event: of the plan that ran last
    """

    limits: Limits
    tables: list[np.ndarray] = field(init=False)
    pools: list[np.ndarray] = field(init=False)
    tokens: np.ndarray = field(init=False)
    requests: dict[int, Request] = field(factory=dict)
    sums: dict[int, int] = field(factory=dict)
    pooled: dict[int, int] = field(factory=dict)
    pooled_event: Pooled | None = None

    def __attrs_post_init__(self) -> None:
        columns = self.limits.pages_for(self.limits.max_len) + self.limits.state_pages
        self.tables = [
            np.zeros((self.limits.max_rows, columns), np.int32) for _ in self.limits.groups
        ]
        self.pools = [
            np.full((count + 1, 1 if is_state(group) else self.limits.page_size, 2), -1, np.int64)
            for count, group in zip(self.limits.num_pages, self.limits.groups, strict=True)
        ]
        self.tokens = np.zeros((self.limits.max_rows, self.limits.max_len + 8), np.int32)

    def run(self, plan: Plan, new_requests: dict[int, RequestState]) -> Sampled:
        """Return the tokens that the plan samples, including those that verification accepts."""
        self.apply_plan(plan, new_requests)
        rows, counts, tokens = [], [], []
        done = plan.pooling == 2 if len(plan.pooling) else np.zeros(len(plan.rows), bool)
        self.pooled_event = Pooled(plan.rows[done], plan.admission_ids[done])
        for i, row in enumerate(plan.rows.tolist()):
            start, stop, num_logits = (
                int(plan.starts[i]),
                int(plan.stops[i]),
                int(plan.num_logits[i]),
            )
            kept = self.count_kept(plan, i)
            self.store(row, np.arange(start, stop), kept, list_saves(plan, row))
            if len(plan.pooling) and plan.pooling[i]:
                assert not num_logits and not plan.samples[i], f"row {row} is scored, yet pools"
                self.pool(row, start, stop, int(plan.admission_ids[i]))
                continue
            if not plan.samples[i]:
                continue
            request = self.requests[row]
            scores_prompt = request.prompt_logprobs and start < len(request.prompt)
            accepted = self.accept(row, stop - (1 if scores_prompt else num_logits), stop)
            end = stop - (1 if scores_prompt else num_logits) + 1 + len(accepted)
            self.tokens[row, end - len(accepted) : end] = accepted
            rows.append(i)
            counts.append(len(accepted))
            tokens += accepted
            num_tokens = stop - start
            self.pad_states(row, kept if kept == num_tokens else 0)
        arrays = [np.array(part, np.int32) for part in (counts, tokens)]
        if not self.limits.max_drafts:
            return Sampled(plan.rows[rows], plan.admission_ids[rows], None, arrays[1])
        return Sampled(plan.rows[rows], plan.admission_ids[rows], *arrays)

    def pool(self, row: int, start: int, stop: int, admission_id: int) -> None:
        """Pool the row's tokens; the result of the last step counts."""
        hashes = hash_prefixes(self.history(row, stop))
        mean = self.requests[row].pooling == "mean"
        # A prefix hit leaves a row of another kind without the sum before it.
        before = self.sums[row] if start and mean else 0
        self.sums[row] = before + sum(hashes[start:])
        self.pooled[admission_id] = self.sums[row] if mean else hashes[-1]

    def apply_plan(self, plan: Plan, new_requests: dict[int, RequestState]) -> None:
        """Write the plan's new requests and page-table entries to the device's tables.

        Pages are copied first.
        """
        copies = plan.copies.reshape(-1, 3)
        for group, pool in enumerate(self.pools):
            sources, targets = copies[copies[:, 0] == group, 1:].T
            is_copied = is_state(self.limits.groups[group])
            assert not len(targets) or (is_copied and targets.all() and sources.all())
            pool[targets] = pool[sources]
        for row, request_state in new_requests.items():
            self.requests[row] = request_state.request
            self.tokens[row, : len(request_state.tokens)] = request_state.tokens
            for table in self.tables:
                table[row] = 0
        request_states = zip(
            plan.page_groups, plan.page_rows, plan.page_columns, plan.page_numbers, strict=True
        )
        for group, row, column, page in request_states:
            self.tables[group][row, column] = page
        drafts = plan.drafts.tolist()
        for row, stop, count in zip(plan.rows, plan.stops, plan.num_drafts, strict=False):
            self.tokens[row, stop - count : stop], drafts = drafts[:count], drafts[count:]

    def count_kept(self, plan: Plan, number: int) -> int:
        """Return behind how many tokens of a plan's row states are kept, from its first one on.

        These are rows of one token and those that verify drafts, in a step with drafts.
        """
        if not len(plan.num_drafts):
            return 0
        count, drafts = int(plan.stops[number] - plan.starts[number]), int(plan.num_drafts[number])
        if not plan.samples[number] or count != drafts + 1:
            assert not drafts or not any(map(is_state, self.limits.groups)), (
                "a row verifies drafts behind tokens whose states are not kept"
            )
            return 0
        return min(count, self.limits.max_drafts)

    def pad_states(self, row: int, kept: int) -> None:
        """Spoil a row's own states where its last one is kept too, as padding behind it would."""
        for table, pool, group in zip(self.tables, self.pools, self.limits.groups, strict=True):
            if is_state(group) and kept:
                pool[table[row, 0], 0] = -1, -1

    def store(
        self,
        row: int,
        positions: np.ndarray,
        kept: int,
        saves: Mapping[int, Mapping[int, int]],
    ) -> None:
        """Write the row's tokens to their slots in every group.

        kept: behind how many of them states are kept
        saves: as `list_saves` gives it
        """
        size = self.limits.page_size
        groups = zip(self.tables, self.pools, self.limits.groups, strict=True)
        for number, (table, pool, group) in enumerate(groups):
            if is_state(group):
                pages = table[row, : kept + 1].tolist()
                self.update_state(pool, row, pages, positions, saves.get(number, {}))
                continue
            pages = table[row, positions // size]
            assert (pages > 0).all(), f"row {row} writes to the dummy page"
            pool[pages, positions % size] = np.stack([self.tokens[row, positions], positions], 1)

    def update_state(
        self,
        pool: np.ndarray,
        row: int,
        pages: list[int],
        positions: np.ndarray,
        saves: Mapping[int, int],
    ) -> None:
        """Add the row's tokens to its state; a row that starts at 0 does not read it.

        pages: of the state, and of those behind tokens from the first one on
        saves: by number of tokens, the page to which the state behind them is saved
        """
        assert all(positions[0] < count <= positions[-1] + 1 for count in saves)
        page, *kept = pages
        assert all(pages) and len({*pages}) == len(pages), f"row {row} lacks pages for states"
        assert page > 0, f"row {row} keeps its state in the dummy page"
        state, count = pool[page, 0].tolist() if positions[0] else (0, 0)
        assert count == positions[0], f"row {row} reads a state that is not its own"
        for number, token in enumerate(self.tokens[row, positions].tolist()):
            state = (state * 31 + token + 7) % PRIME
            count = int(positions[number]) + 1
            if number < len(kept):
                pool[kept[number], 0] = state, count
            if count in saves:
                assert saves[count] > 0, "a state is saved to the dummy page"
                pool[saves[count], 0] = state, count
        pool[page, 0] = state, positions[-1] + 1

    def history(self, row: int, length: int, stop: int | None = None) -> np.ndarray:
        """Return the row's context, read back through the page tables.

        Positions outside a group's window are not read there. A state has taken in the tokens up to
        `stop`, which may be drafts behind the context.
        """
        size = self.limits.page_size
        result = np.zeros(0, np.int64)
        for table, pool, group in zip(self.tables, self.pools, self.limits.groups, strict=True):
            if is_state(group):
                state, count = pool[table[row, 0], 0].tolist()
                taken = self.tokens[row, length : stop or length]
                expected = hash_tokens(np.concatenate((result, taken)))
                assert count == (stop or length) and state == expected, (
                    f"row {row} has a state that is not its own"
                )
                continue
            first = max(length - group.window, 0) if group.window else 0
            positions = np.arange(first, length)
            pages = table[row, positions // size]
            slots = pool[pages, positions % size]
            assert (pages > 0).all() and (slots[:, 1] == positions).all(), (
                f"row {row} reads pages that are not its own"
            )
            if first == 0 and len(positions) == length:
                result = slots[:, 0]
        return result

    def accept(self, row: int, first: int, stop: int) -> list[int]:
        """Return the tokens that verification accepts: correct drafts, then one of the model."""
        accepted = []
        for position in range(first, stop):
            token = next_token(self.history(row, position + 1, stop))
            accepted.append(token)
            if position + 1 < stop and int(self.tokens[row, position + 1]) != token:
                break
        return accepted
