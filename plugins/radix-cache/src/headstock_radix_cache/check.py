"""Invariants of an index, and of the arguments of its callers."""

from __future__ import annotations

from headstock.spi.arrays import Ints
from headstock_radix_cache.group_tree import GroupIndex
from headstock_radix_cache.tree import Index, Node


def _locked_children(node: Node) -> int:
    """How many of a node's children are locked."""
    return sum(child.refs > 0 for child in node.children.values())


def assert_handle(handle: Node, must_be_held: bool) -> None:
    """Raise AssertionError unless the handle is indexed and, if required, held."""
    assert handle.parent is not None, (
        f"the handle's page {handle.page} was evicted: hold a match before evicting"
    )
    assert not must_be_held or handle.refs > _locked_children(handle), (
        f"the handle of page {handle.page} is not held"
    )


def assert_held_pages(index: GroupIndex, group: int, pages: Ints) -> None:
    """Raise AssertionError unless all pages are of a window group of the index, and held."""
    for page in pages.tolist():
        assert page in index.nodes[group], f"page {page} of group {group} is not indexed"
        assert page not in index.idle_pages[group], f"page {page} of group {group} is not held"


def assert_insert(
    index: Index, handle: Node | None, keys: Ints, pages: Ints, page_size: int
) -> None:
    """Raise AssertionError unless pages are whole, new or in place, and the handle is held."""
    if handle is not None:
        assert_handle(handle, must_be_held=True)
    assert keys.dtype == "int32", f"expected int32 keys, got {keys.dtype}"
    count = pages.shape[1]
    assert len(keys) == count * page_size, (
        f"{count} pages of {page_size} do not take {len(keys)} keys"
    )
    for group, page_list in enumerate(pages.tolist()):
        if isinstance(index, GroupIndex) and group in index.states:
            assert not any(page_list), f"states {page_list} come by add_snapshot"
            continue
        # Pages behind a window are gone.
        if isinstance(index, GroupIndex) and group in index.windows:
            page_list = [page for page in page_list if page]
        assert len(set(page_list)) == len(page_list), f"a page is passed twice: {page_list}"
        assert min(page_list, default=1) > 0, f"page {min(page_list)} is not a page of the pool"
        waiting = index.dropped_pages[group] if isinstance(index, GroupIndex) else index.dropped
        dropped = set(page_list).intersection(waiting)
        assert not dropped, (
            f"pages {sorted(dropped)} are in the index already, waiting to be evicted"
        )


def assert_snapshot(index: GroupIndex, handle: Node | None, num_pages: int, pages: Ints) -> None:
    """Raise AssertionError unless the snapshots are new, and of a prefix that is held."""
    assert handle is not None, "a snapshot needs a prefix"
    assert_handle(handle, must_be_held=True)
    assert 0 < num_pages <= handle.depth, f"{num_pages} pages of {handle.depth} are not a prefix"
    for group, page in enumerate(pages.tolist()):
        assert (page > 0) == (group in index.states), f"group {group}: page {page}"
        assert not page or page not in index.nodes[group], f"page {page} is in the index already"


def assert_index(index: Index, page_size: int) -> None:
    """Raise AssertionError with a reason when the index contradicts itself; O(pages)."""
    nodes = list(index.iter_nodes())
    assert len(nodes) == index.size, f"{len(nodes)} nodes but size {index.size}"
    for group, count in enumerate(index.count_pages()):
        pages = index.list_pages(group)
        assert len(pages) == count, f"group {group}: expected {count} pages, got {len(pages)}"
        assert len(set(pages)) == len(pages), "a page is indexed twice"
        assert min(pages, default=1) > 0, "the dummy page is indexed"
    for root in index.roots.values():
        assert root.children, f"root {root!r} is of a namespace without pages"
        assert root.refs == 1 + _locked_children(root), (
            f"root {root!r} has {_locked_children(root)} locked children"
        )
    for node in nodes:
        assert node.parent is not None and node.parent.children[node.key] is node, (
            f"{node!r} is in the wrong place"
        )
        assert node.depth == node.parent.depth + 1, (
            f"{node!r} has a parent of depth {node.parent.depth}"
        )
        assert len(node.key) == page_size * 4, (
            f"{node!r} stands for {len(node.key) // 4} keys, not {page_size}"
        )
        assert node.refs >= _locked_children(node), (
            f"{node!r} has {_locked_children(node)} locked children"
        )
        assert (node in index.idle) == (node.refs == 0), (
            f"{node!r} is idle exactly when nothing refers to it"
        )
    _assert_order(index, set(nodes))
    if isinstance(index, GroupIndex):
        _assert_windows(index, nodes)


def _assert_windows(index: GroupIndex, nodes: list[Node]) -> None:
    """Raise AssertionError unless every page of a window or a state is mapped to its node."""
    for group in range(len(index.groups)):
        indexed = {node.page[group]: node for node in nodes if node.page[group]}
        if group not in index.nodes:
            assert len(indexed) == len(nodes), f"a node has no page of group {group}"
            continue
        assert indexed == index.nodes[group], f"group {group}: pages are with other nodes"
        idle = index.idle_pages[group]
        assert idle.items() <= indexed.items(), f"group {group}: a page is idle but not indexed"
        for page, node in indexed.items():
            may_be_held = node.refs and group not in index.states
            assert may_be_held or page in idle, (
                f"group {group}: page {page} is held but {node!r} is not"
            )


def _assert_order(index: Index, nodes: set[Node]) -> None:
    """Raise AssertionError unless eviction in order takes leaves only and all ends are indexed."""
    seen: set[Node] = set()
    for node in index.idle:
        assert node in nodes, f"{node!r} is idle but not in the tree"
        assert seen.issuperset(node.children.values()), (
            f"{node!r} would be evicted before its children"
        )
        seen.add(node)
    assert nodes.issuperset(index.ends), "a prefix ends at a node that is not in the tree"
