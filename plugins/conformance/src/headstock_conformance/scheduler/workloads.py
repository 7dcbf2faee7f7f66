"""Random engines and requests for schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import numpy as np
from attrs import evolve

from headstock.scheduler import Limits, Paced, PoolingKind, Request
from headstock.scheduler.invariants import check_state
from headstock.spi import (
    Budget,
    CachePolicy,
    FullKV,
    KVGroup,
    ScheduleDecision,
    ScheduleFunction,
    StateKV,
    StateTensor,
    View,
)
from headstock_conformance.scheduler.toy_device import VOCAB, alone
from headstock_conformance.scheduler.toy_schedule import Drive

PolicyMaker = Callable[[int, tuple[KVGroup, ...]], CachePolicy]
"""Makes a cache policy for this page size and these groups."""

LONGEST = 160
"""Tokens of a request at most."""
FULL = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))


def window(length: int) -> KVGroup:
    """A second group that sees the latest `length` tokens."""
    return KVGroup(layers=(1,), layout=FULL.layout, window=length)


STATE = KVGroup(layers=(2,), layout=StateKV(tensors=(StateTensor("history", (1,)),)))
"""A group that keeps a state of all tokens in one page."""


def run_nothing(view: View, budget: Budget) -> ScheduleDecision:
    """A decision that runs no row."""
    return ScheduleDecision(rows=view.rows_by_priority[:0], counts=view.rows_by_priority[:0])


def fewest_pages(group: KVGroup, **sizes: int) -> int:
    """Return the minimum pages of the group that fit each request of `LONGEST` tokens."""
    bounds = make_limits(run_nothing, groups=(group,), **sizes)
    return bounds.max_pages(0, LONGEST)


def make_limits(schedule: ScheduleFunction, **changes: Any) -> Limits:
    """Return small limits, without an index unless `changes` have a policy.

    A number of pages is that of every group; a state group has a page for each row.
    """
    groups = changes.setdefault("groups", (FULL,))
    pages = changes.get("num_pages", 100)
    if isinstance(pages, int):
        rows = changes.get("max_rows", 8)
        changes["num_pages"] = tuple(
            pages if group.layout is FULL.layout else rows for group in groups
        )
    defaults = {
        "page_size": 4,
        "max_rows": 8,
        "max_batch_tokens": 64,
        "max_len": LONGEST,
        "policy": None,
        "check": True,
        "scheduler": "checked",
    }
    return Limits(**(defaults | {"schedule": schedule} | changes))


def prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    """Random tokens."""
    return rng.integers(0, VOCAB, length).astype(np.int32)


def request(
    id: str, tokens: np.ndarray | list[int], max_tokens: int = 5, **changes: Any
) -> Request:
    """A request for the toy model."""
    return Request(id=id, prompt=np.asarray(tokens, np.int32), max_tokens=max_tokens, **changes)


def random_limits(
    rng: np.random.Generator,
    schedule: ScheduleFunction,
    scheduler: str,
    make_policy: PolicyMaker | None = None,
) -> Limits:
    """Return limits of any shape that can serve every request of `random_requests`.

    Some requests fit only by themselves. Prefixes are reused if there is a policy.
    """
    size = int(rng.choice([1, 4, 16]))
    groups = random_groups(rng)
    reuse = rng.random() < 0.7
    recompute = rng.random() < 0.1
    rows = int(rng.integers(1, 17))
    tokens = 512 if recompute else int(rng.choice([3, 17, 64, 512]))
    sizes = {"page_size": size, "max_batch_tokens": tokens, "max_rows": rows}
    least = [fewest_pages(group, **sizes) for group in groups]
    most = [rows if group is STATE else 400 // size for group in groups]
    has_policy = make_policy is not None and reuse and not recompute
    num_pages = [
        few if rng.random() < 0.3 else int(rng.integers(few, max(many, few) + 1))
        for few, many in zip(least, most, strict=True)
    ]
    if STATE in groups:
        sizes |= random_snapshots(rng, sizes, has_policy=has_policy)
        if sizes["snapshot_tokens"]:
            num_pages[groups.index(STATE)] = rows + int(rng.integers(1, 9))
    return make_limits(
        schedule,
        **sizes,
        num_pages=tuple(num_pages),
        groups=groups,
        scheduler=scheduler,
        policy=make_policy(size, groups) if make_policy is not None and has_policy else None,
        recompute=recompute,
        overlap=bool(rng.random() < 0.5),
        check=False,
    )


def random_snapshots(
    rng: np.random.Generator, sizes: Mapping[str, int], *, has_policy: bool
) -> dict[str, int]:
    """Return where chunks of prompts end, and after how many tokens states are copied."""
    room = sizes["max_batch_tokens"] - sizes["max_rows"]
    alignment = int(rng.choice([each for each in (1, 3, 8, 16) if each <= room] or [1]))
    every = lcm(alignment, sizes["page_size"]) * int(rng.integers(1, 4))
    return {"alignment": alignment, "snapshot_tokens": every if has_policy else 0}


def random_groups(rng: np.random.Generator) -> tuple[KVGroup, ...]:
    """Return one full group, and sometimes a window or a state."""
    windows = (window(int(rng.integers(1, 40))),) if rng.random() < 0.3 else ()
    return (FULL, *windows, *((STATE,) if rng.random() < 0.2 else ()))


def pausing(schedule: ScheduleFunction) -> ScheduleFunction:
    """Return the scheduler, changed to run nothing in every second step."""

    def schedule_or_pause(view: View, budget: Budget) -> ScheduleDecision:
        return schedule(view, budget) if view.step % 2 else run_nothing(view, budget)

    return schedule_or_pause


def to_pooling(one: Request, kind: PoolingKind) -> Request:
    """The request, changed to pool its prompt."""
    return evolve(
        one,
        max_tokens=0,
        min_tokens=0,
        stop_ids=(),
        wait_for_sample=False,
        prompt_logprobs=False,
        pooling=kind,
    )


def random_requests(rng: np.random.Generator) -> list[Request]:
    """Return up to 30 requests, many of which share a prefix; some are repeated."""
    shared, most_requests = prompt(rng, 60), int(rng.integers(1, 30))
    requests: list[Request] = []
    while len(requests) < most_requests:
        tokens = prompt(rng, int(rng.integers(1, 100)))
        if rng.random() < 0.5:
            tokens = np.concatenate([shared[: int(rng.integers(1, 60))], tokens[:40]])
        room = LONGEST - len(tokens)
        most = room if rng.random() < 0.05 else int(rng.integers(1, min(60, room) + 1))
        one = request(
            str(len(requests)),
            tokens,
            most,
            min_tokens=int(rng.integers(0, most + 1)),
            stop_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist()),
            priority=int(rng.integers(0, 3)) if rng.random() < 0.5 else 0,
            user=("", "ada", "bob")[len(requests) % 3],
            adapter="lora" if len(requests) % 5 == 0 else "",
            namespace="other" if rng.random() < 0.2 else "",
            wait_for_sample=bool(rng.random() < 0.1),
            prompt_logprobs=bool(rng.random() < 0.1),
        )
        if rng.random() < 0.2:
            one = to_pooling(one, "mean" if rng.random() < 0.5 else "last")
        requests += [evolve(one, id=f"{one.id}.{i}") for i in range(rng.choice([1, 1, 3]))]
    return requests[:most_requests]


def simulate(
    seed: int, schedule: ScheduleFunction, scheduler: str, make_policy: PolicyMaker | None = None
) -> Drive:
    """Run one random workload to its end.

    Every request gets the tokens that it gets alone; one that can never fit is refused.
    """
    rng = np.random.default_rng(seed)
    bounds = random_limits(rng, schedule, scheduler, make_policy)
    if rng.random() < 0.2:
        bounds = evolve(bounds, schedule=pausing(bounds.schedule))
    drafting = not bounds.recompute and rng.random() < (0.4 if len(bounds.groups) == 1 else 0.8)
    drive = Drive(bounds, rng if drafting else None)
    requests = [
        *random_requests(rng),
        request("whole", prompt(rng, LONGEST - 1), 1),
        # No token follows, so it may be as long as any sequence.
        request("pooled", prompt(rng, LONGEST), 0, pooling="mean"),
    ]
    todo = [*requests, request("never", prompt(rng, LONGEST), 1)]
    pace = np.random.default_rng((seed, 1))
    is_paced = pace.random() < 0.3
    while todo or drive.busy:
        if is_paced and pace.random() < 0.1:
            most, every_step = int(pace.integers(1, 40)), bool(pace.random() < 0.5)
            drive.events.append(Paced(most, every_step=every_step))
        while todo and rng.random() < 0.3:
            drive.submit(todo.pop(0))
        plan = drive.step()
        assert plan.num_tokens <= bounds.max_batch_tokens, f"seed {seed}: a step is too large"
        assert len(drive.plans) < 10_000, f"seed {seed} is still busy"
        if len(drive.plans) % 16 == 0:
            check_state(drive.state, drive.limits)
    check_state(drive.state, drive.limits)
    wanted = {one.id: alone(one) for one in requests} | {"never": []}
    assert drive.outputs == wanted, f"seed {seed}: wrong tokens"
    assert {name for name, reason in drive.reasons.items() if reason not in ("stop", "length")} == {
        "never"
    }
    assert not any(map(np.count_nonzero, drive.state.refs))
    return drive
