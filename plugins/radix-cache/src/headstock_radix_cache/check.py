"""What must be true of an index, and of the arguments that a caller passes with it."""

from __future__ import annotations

from headstock.spi.arrays import Ints
from headstock_radix_cache.tree import Index, Node


def _locked_children(node: Node) -> int:
    """How many of a node's children are locked."""
    return sum(child.refs > 0 for child in node.children.values())


def assert_handle(handle: Node, must_be_held: bool) -> None:
    """Raise AssertionError unless the handle is indexed and, when asked, someone holds it."""
    assert handle.parent is not None, (
        f"the handle's page {handle.page} was evicted: hold a match before evicting"
    )
    assert not must_be_held or handle.refs > _locked_children(handle), (
        f"the handle of page {handle.page} is not held"
    )


def assert_insert(
    index: Index, handle: Node | None, tokens: Ints, pages: Ints, page_size: int
) -> None:
    """Raise AssertionError unless pages are whole, new or in place, and the handle is held."""
    if handle is not None:
        assert_handle(handle, must_be_held=True)
    assert tokens.dtype == "int32", f"wanted int32 tokens, got {tokens.dtype}"
    assert len(tokens) == len(pages) * page_size, (
        f"{len(pages)} pages of {page_size} do not take {len(tokens)} tokens"
    )
    page_list = pages.tolist()
    assert len(set(page_list)) == len(page_list), f"a page is given twice: {page_list}"
    assert min(page_list, default=1) > 0, f"page {min(page_list)} is not a page of the pool"
    dropped = set(page_list).intersection(index.dropped)
    assert not dropped, f"pages {sorted(dropped)} are in the index already, waiting to be evicted"


def assert_index(index: Index, page_size: int) -> None:
    """Raise AssertionError with a reason when the index contradicts itself; O(pages)."""
    nodes = list(index.iter_nodes())
    pages = [node.page for node in nodes] + index.dropped
    assert len(nodes) == index.size, f"{len(nodes)} nodes but size {index.size}"
    assert len(set(pages)) == len(pages), "a page is indexed twice"
    assert min(pages, default=1) > 0, "the dummy page is indexed"
    for root in index.roots.values():
        assert root.children, f"root {root!r} is of a namespace without pages"
        assert root.refs == 1 + _locked_children(root), (
            f"root {root!r} has {_locked_children(root)} locked children"
        )
    for node in nodes:
        assert node.parent is not None and node.parent.children[node.key] is node, (
            f"{node!r} hangs in the wrong place"
        )
        assert node.depth == node.parent.depth + 1, (
            f"{node!r} has a parent of depth {node.parent.depth}"
        )
        assert len(node.key) == page_size * 4, (
            f"{node!r} stands for {len(node.key) // 4} tokens, not {page_size}"
        )
        assert node.refs >= _locked_children(node), (
            f"{node!r} has {_locked_children(node)} locked children"
        )
        assert (node in index.idle) == (node.refs == 0), (
            f"{node!r} is idle exactly when nothing refers to it"
        )
    _assert_order(index, set(nodes))


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
