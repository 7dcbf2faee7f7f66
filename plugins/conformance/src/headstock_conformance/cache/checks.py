"""The cases of a cache policy, by its claims."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from types import MappingProxyType

import numpy as np
from attrs import frozen

from headstock import registry
from headstock.errors import shorten
from headstock.spi import (
    CachePolicy,
    CacheSpec,
    DeviceEnv,
    FullKV,
    KVGroup,
    LatentKV,
    LayoutKind,
    StateKV,
    StateTensor,
)
from headstock_conformance.cache import sizes
from headstock_conformance.case import Case

FULL = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
LATENT = KVGroup(layers=(1,), layout=LatentKV(dim=2, rope_dim=1))
STATE = KVGroup(layers=(3,), layout=StateKV(tensors=(StateTensor("sum", (1,)),), alignment=1))
PAGE_SIZES = (2, 3, 1, 16)
LONG_NAME = "0123456789abcdef" * 20
"""A namespace like a digest, but longer."""
EXAMPLES = 60
STEPS = 30
"""Number of step sequences drawn for each model, and steps of one."""


def window(length: int) -> KVGroup:
    """A group that keeps the latest tokens."""
    return KVGroup(layers=(2,), layout=FULL.layout, window=length)


GROUPS = {
    "one full group": (FULL,),
    "full and latent groups": (FULL, LATENT),
    "a full group and a window": (FULL, window(4)),
    "a window first": (window(2), FULL),
    "two windows": (FULL, window(1), window(6)),
    "a window alone": (window(3),),
    "a full group and a state": (FULL, STATE),
    "a state beside a window": (STATE, window(4), FULL),
}


@frozen(kw_only=True)
class Subject:
    """A cache plugin."""

    spec: CacheSpec
    opt: Sequence[str] = ()

    def make(self, page_size: int, groups: Sequence[KVGroup]) -> CachePolicy:
        """A policy with the options.   raises: PluginBroken"""
        options = registry.make_options(self.spec, self.opt)
        policy: CachePolicy = registry.make_part(
            self.spec, CachePolicy, page_size, tuple(groups), options
        )
        return policy

    @property
    def page_size(self) -> int:
        """A page size that it claims."""
        sizes = self.spec.capabilities.page_sizes
        return next((size for size in PAGE_SIZES if size in sizes), (*sizes.values, sizes.step)[0])


def list_cases(spec: CacheSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases for the claims of the spec; independent of the machine."""
    subject = Subject(spec=spec, opt=opt)
    if not spec.capabilities.reuse:
        return (Case("nothing is shared", partial(check_nothing_shared, subject)),)
    return tuple(Case(name, run) for name, run in list_named(subject))


def list_named(subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of a policy that shares pages."""
    claims = subject.spec.capabilities
    for name, groups in GROUPS.items():
        kinds = {group.layout.kind for group in groups}
        if not kinds <= claims.layouts or not (
            claims.windows or all(group.window is None for group in groups)
        ):
            continue
        if LayoutKind.STATE in kinds:
            yield f"{name}: snapshots", partial(check_snapshots, subject, groups)
        else:
            yield f"{name}: namespaces", partial(check_namespaces, subject, groups)
            yield f"{name}: other keys", partial(check_keys, subject, groups)
            yield f"{name}: pages in order", partial(check_order, subject, groups)
            yield f"{name}: evicted pages", partial(check_evicted, subject, groups)
            for text, check in SIZE_CHECKS.items():
                yield f"{name}: {text}", partial(run_sized, subject, groups, check)
        yield f"{name}: rows in any order", partial(check_rows, subject, groups)


SIZE_CHECKS: Mapping[str, Callable[[CachePolicy, Sequence[KVGroup], int], object]] = (
    MappingProxyType(
        {
            "hundreds of pages": sizes.check_long,
            "hundreds of paths": sizes.check_wide,
            "hundreds of calls": sizes.check_calls,
            "pages that a row holds": sizes.check_partly_held,
        }
    )
)


def run_sized(
    subject: Subject,
    groups: Sequence[KVGroup],
    check: Callable[[CachePolicy, Sequence[KVGroup], int], object],
) -> None:
    """Run a check of sizes with a new policy."""
    size = subject.page_size
    check(subject.make(size, groups), groups, size)


def ints(values: object) -> np.ndarray:
    """The values as the contract requires them."""
    return np.array(values, np.int32)


def insert_pages(
    policy: CachePolicy,
    groups: Sequence[KVGroup],
    size: int,
    count: int,
    namespace: str = "a",
) -> object:
    """An index with `count` pages of the keys 0, 1, 2, ..."""
    index = policy.new_index()
    keys, pages = ints(range(size * count)), ints([range(1, count + 1)] * len(groups))
    policy.insert(index, None, keys, pages, namespace)
    return index


def check_namespaces(subject: Subject, groups: Sequence[KVGroup]) -> None:
    """Keys of one namespace are never matched in another."""
    size = subject.page_size
    policy = subject.make(size, groups)
    keys = ints(range(4 * size))
    for own in ("a", LONG_NAME):
        index = insert_pages(policy, groups, size, 4, own)
        found = policy.match_prefix(index, keys, own).pages.shape[1]
        assert found == 4, f"match_prefix finds {found} of 4 pages that were inserted"
        for name in ("", "b", f"{own}a", own.upper(), f"{own} ", own[1:], f"{own[:-1]}b"):
            match = policy.match_prefix(index, keys, name).pages
            assert match.shape[1] == 0, (
                "the namespace is ignored: match_prefix finds "
                f"{match.shape[1]} pages of {shorten(own)!r} for {shorten(name)!r}"
            )


def check_keys(subject: Subject, groups: Sequence[KVGroup]) -> None:
    """A match is a prefix of exactly the given keys."""
    size = subject.page_size
    policy = subject.make(size, groups)
    index = insert_pages(policy, groups, size, 4)
    for changed in range(4 * size):
        keys = ints(range(4 * size))
        keys[changed] += 1000
        matched = policy.match_prefix(index, keys, "a").pages.shape[1]
        most = changed // size
        assert matched <= most, (
            f"match_prefix finds {matched} pages though the key at {changed} is another: "
            f"expected at most {most}"
        )


def check_order(subject: Subject, groups: Sequence[KVGroup]) -> None:
    """A match gives exactly the pages of its keys, in order, and 0 behind a window."""
    size = subject.page_size
    policy = subject.make(size, groups)
    index = insert_pages(policy, groups, size, 4)
    for count in range(1, 5):
        matched = policy.match_prefix(index, ints(range(count * size)), "a").pages.tolist()
        firsts = [group.first_kept_page(count * size, size) for group in groups]
        expected = [[0] * first + list(range(first + 1, count + 1)) for first in firsts]
        assert matched == expected, (
            f"match_prefix gives a page of other keys: expected pages {expected}, got {matched}"
        )


def check_evicted(subject: Subject, groups: Sequence[KVGroup]) -> None:
    """Held pages stay; others are evicted, and every page is returned once."""
    size, numbers = subject.page_size, range(len(groups))
    policy = subject.make(size, groups)
    index = policy.new_index()
    root = policy.match_prefix(index, ints([]), "a").handle
    policy.hold(index, root)
    pages = ints([range(1, 5)] * len(groups))
    end = policy.insert(index, root, ints(range(4 * size)), pages, "a").handle
    check_counts(policy, index, [4] * len(groups))
    evicted = policy.evict_all(index)
    assert not any(map(len, evicted)), f"evict_all gives {evicted}, and a row holds them"
    for number, group in enumerate(groups):
        if group.window is not None:
            policy.release_pages(index, number, pages[number])
    policy.release(index, end)
    check_counts(policy, index, [0] * len(groups))
    for number in numbers:
        for count in (1, 2, 4):
            before = [sorted(policy.indexed_pages(index, each).tolist()) for each in numbers]
            evicted = policy.evict(index, number, count)
            for each, gone in enumerate(evicted):
                after = policy.indexed_pages(index, each).tolist()
                assert sorted(after + gone.tolist()) == before[each], (
                    "a page is lost, or indexed and free at once: evict gives pages "
                    f"{gone.tolist()} of {before[each]}, and {after} stay in the index"
                )
            least = min(count, len(before[number]))
            assert len(evicted[number]) >= least, (
                f"evict gives {len(evicted[number])} of {count} pages, "
                f"and {len(before[number])} can be evicted"
            )


def check_snapshots(subject: Subject, groups: Sequence[KVGroup]) -> None:
    """A match ends at a snapshot, says how far the index goes on, and is gone without it."""
    size, states = subject.page_size, [groups.index(STATE)]
    policy = subject.make(size, groups)
    index = policy.new_index()
    keys, pages = ints(range(6 * size)), ints([range(1, 7)] * len(groups))
    pages[states] = 0
    handle = policy.insert(index, None, keys, pages, "a").handle

    def find(count: int, wanted: int, page: int) -> None:
        match = policy.match_prefix(index, keys[: count * size], "a")
        found = match.pages[states[0]].tolist()
        assert found == [0] * (wanted - 1) + [page] * (wanted > 0), (
            f"match_prefix finds states {found} in {count} pages: expected {wanted} pages, and "
            f"page {page} behind them"
        )
        assert match.num_known == count, (
            f"match_prefix knows {match.num_known} of {count} pages that are indexed"
        )

    find(6, 0, 0)
    for num_pages, page, kept in ((5, 9, 9), (3, 8, 8), (5, 7, 9)):
        own = np.zeros(len(groups), np.int32)
        own[states] = page
        answer = policy.add_snapshot(index, handle, num_pages, own)[states].tolist()
        assert answer == [kept], (
            f"add_snapshot answers {answer} for page {page} behind {num_pages} pages: expected "
            f"[{kept}]"
        )
    for count, (num_pages, page) in {6: (5, 9), 5: (5, 9), 4: (3, 8), 3: (3, 8), 2: (0, 0)}.items():
        find(count, num_pages, page)
    evicted = policy.evict(index, states[0], 1)[states[0]].tolist()
    assert evicted in ([8], [9]), f"evict gives states {evicted}: expected page 8 or 9"
    left = 8 if evicted == [9] else 9
    find(6, 3 if left == 8 else 5, left)


def check_counts(policy: CachePolicy, index: object, num_held: list[int]) -> None:
    """Raise AssertionError unless each group has 4 pages and `count` of them are held."""
    stats = policy.stats(index)
    for group, count in enumerate(num_held):
        counts = stats.pages[group], stats.held[group]
        assert counts == (4, count), (
            f"stats: expected {(4, count)} indexed and held pages, got {counts}"
        )


def check_nothing_shared(subject: Subject) -> None:
    """A policy that claims no reuse never matches or keeps a page."""
    size, groups = subject.page_size, (FULL, FULL)
    policy = subject.make(size, groups)
    index = policy.new_index()
    keys, pages = ints(range(3 * size)), ints([[1, 2, 3], [4, 5, 6]])
    inserted = policy.insert(index, None, keys, pages, "")
    assert np.array_equal(inserted.canonical, pages), "insert answers with other pages"
    match = policy.match_prefix(index, keys, "").pages
    assert match.shape == (2, 0), f"match_prefix finds pages {match.tolist()}, and claims no reuse"
    policy.release(index, inserted.handle)
    policy.check_index(index)
    assert [len(each) for each in policy.evict_all(index)] == [0, 0], "it keeps pages"


def check_rows(subject: Subject, groups: tuple[KVGroup, ...]) -> None:
    """Rows match, hold, insert, end and evict in random order, drawn by Hypothesis.

    The seed is fixed, but Hypothesis also uses constants of loaded modules. Faults that no policy
    may have therefore have a separate check without drawing.
    """
    # late: Hypothesis is slow to import, and only this case needs it
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from headstock_conformance.cache.rows import CacheRows

    sizes = [size for size in PAGE_SIZES[:3] if size in subject.spec.capabilities.page_sizes]
    members = {
        "groups": groups,
        "make": staticmethod(subject.make),
        "page_sizes": tuple(sizes or [subject.page_size]),
    }
    machine = type("CheckedRows", (CacheRows,), members)
    drawn = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        derandomize=True,
        database=None,
        deadline=None,
        # The reason of a case is one line: shrinking would cost minutes and not be visible.
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    # Hypothesis prints the steps that lead to a failure; the reason of the case is one line.
    with redirect_stdout(io.StringIO()):
        run_state_machine_as_test(machine, settings=drawn)
