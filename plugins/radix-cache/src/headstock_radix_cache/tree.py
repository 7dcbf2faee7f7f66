"""A prefix tree with one node per page, and the order in which its pages may be evicted.

A node is *locked* while a hold protects it: its own, or one below it. `refs` counts the own holds
    plus the locked children, so a node is locked exactly when `refs > 0`. A hold that moves from a
    node to a new child leaves the node's `refs` unchanged: one hold fewer, one locked child more.
    Indexing a page as it fills is therefore O(1).

`idle` lists the unlocked nodes in the order in which they were unlocked, which is the order of last
use. A node is unlocked only after all its children, so they come before it. The first idle node is
always a leaf, and eviction needs no search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any


class Node:
    """One indexed page. Its path from the root spells the keys up to and including the page.

    `page` is a number; a list of one for each KV group in a `GroupIndex`.
    """

    __slots__ = ("children", "depth", "key", "page", "parent", "refs")

    def __init__(self, page: Any, parent: Node | None, key: bytes, depth: int) -> None:
        self.page = page
        self.parent = parent  # None: a root, or no longer indexed
        self.key = key  # the page's own keys
        self.depth = depth  # pages from the root to here
        self.refs = 1
        self.children: dict[bytes, Node] = {}

    def __repr__(self) -> str:
        return f"Node(page={self.page}, depth={self.depth}, refs={self.refs})"


class Index:
    """The tree of each namespace, and what may be evicted.

    Written in place; `version` goes up with each change.

    `ends` are the last nodes of released prefixes, oldest first; kept only when their number is
    limited. `dropped` are pages of prefixes beyond that limit: never matched again, waiting to be
    collected by `evict`.
    """

    __slots__ = ("dropped", "ends", "idle", "roots", "size", "version")

    def __init__(self) -> None:
        self.roots: dict[str, Node] = {}
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.ends: OrderedDict[Node, None] = OrderedDict()
        self.dropped: list[Any] = []
        self.size = 0  # pages in the trees
        self.version = 0

    def get_root(self, namespace: str) -> Node:
        """The root of a namespace, made when missing and removed with its last page.

        It has no page and is always locked.
        """
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(
                -1, None, namespace.encode(errors="surrogatepass"), 0
            )
        return root

    def lock(self, node: Node) -> None:
        """Add a hold; O(1) on a locked node, else one step for each node that becomes locked."""
        while True:
            node.refs += 1
            if node.refs > 1 or node.parent is None:
                return
            del self.idle[node]
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Remove a hold; one step for each node that becomes idle."""
        node.refs -= 1
        while node.refs == 0 and node.parent is not None:
            # At the end of the list, after its children: the first idle node is always a leaf.
            self.idle[node] = None
            node = node.parent
            node.refs -= 1

    def append_pages(
        self,
        node: Node,
        data: bytes,
        width: int,
        start: int,
        pages: Sequence[Any],
        canonical: list[Any],
    ) -> Node:
        """Index `pages` behind a held node, whose hold moves to the returned node at their end.

        start: where the first page's keys begin in `data`
        width: bytes of a page's keys
        writes: canonical, each page that now stands for its keys
        """
        for page in pages:
            key = data[start : start + width]
            start += width
            child = node.children.get(key)
            # In each case the hold moves from the node to the child. The node gains a locked child
            # unless the child was locked before.
            if child is None:
                child = node.children[key] = Node(page, node, key, node.depth + 1)
                self.size += 1
            elif child.refs:
                child.refs += 1
                node.refs -= 1
            else:
                child.refs = 1
                del self.idle[child]
            canonical.append(child.page)
            node = child
        return node

    def cut_leaf(self, node: Node) -> Any:
        """Cut an unlocked leaf off and return its page."""
        parent = node.parent
        assert parent is not None and not node.children and node.refs == 0, node
        del parent.children[node.key]
        if parent.parent is None and not parent.children:  # most namespaces are not used again
            del self.roots[parent.key.decode(errors="surrogatepass")]
        node.parent = None
        self.size -= 1
        return node.page

    def pop_oldest(self) -> Any:
        """Cut off the least recently used leaf and return its page."""
        return self.cut_end(self.idle.popitem(last=False)[0])

    def cut_end(self, node: Node) -> Any:
        """Cut off a leaf that is no longer in `idle`, and return its page."""
        parent = node.parent
        if node in self.ends:
            # The rest of the prefix still counts as one, and is now the oldest.
            del self.ends[node]
            if parent is not None and parent.depth and parent not in self.ends:
                self.ends[parent] = None
                self.ends.move_to_end(parent, last=False)
        return self.cut_leaf(node)

    def drop_leaf(self, node: Node) -> None:
        """Cut off an idle leaf, and keep its page for `evict`."""
        del self.idle[node]
        self.dropped.append(self.cut_leaf(node))

    def trim_end(self, node: Node) -> Node:
        """Cut off the useless end of a released prefix, and return its last node."""
        return node

    def note_end(self, node: Node, limit: int) -> None:
        """Record that a prefix ended at `node`; drop the oldest beyond `limit`, except shared
        pages."""
        # Moved to the end as well, because a prefix that ended before keeps its old place.
        self.ends[node] = None
        self.ends.move_to_end(node)
        while len(self.ends) > limit:
            oldest = self.ends.popitem(last=False)[0]
            while (
                oldest.parent is not None
                and not oldest.refs
                and not oldest.children
                and oldest not in self.ends
            ):
                parent = oldest.parent
                self.drop_leaf(oldest)
                oldest = parent

    def evict(self, group: int, count: int) -> list[list[int]]:
        """Drop up to `count` unlocked pages and return them by KV group: here of one."""
        count = min(max(count, 0), self.count_evictable(group))
        # Dropped pages first: nothing can match them any more.
        pages = self.dropped[:count]
        del self.dropped[:count]
        pages += [self.pop_oldest() for _ in range(count - len(pages))]
        return [pages]

    def count_evictable(self, group: int) -> int:
        """How many pages of a KV group are not locked; O(1)."""
        return len(self.idle) + len(self.dropped)

    def count_pages(self) -> tuple[int, ...]:
        """How many pages of each KV group are indexed, or dropped and not yet evicted."""
        return (self.size + len(self.dropped),)

    def list_pages(self, group: int) -> list[int]:
        """Those pages of a KV group, in no order."""
        return [node.page for node in self.iter_nodes()] + self.dropped

    def iter_nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
