"""A prefix tree whose nodes have a page in each of several KV groups, or one with a window.

In a group that keeps all tokens every node has a page. In a window group it may have none: the row
    had freed it before it was indexed, or it was evicted alone. A prefix is therefore matched up to
    a node where the window's pages are complete.

A group that keeps a state has a page at some nodes, the state behind their tokens. A match ends at
    such a node.

Pages of a window group are *held* individually, not along the path: a row that advances frees the
    pages behind its window, while its hold still locks their nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headstock.spi.kv import KVGroup, LayoutKind
from headstock_radix_cache.tree import Index, Node


class GroupIndex(Index):
    """The tree for several KV groups, or for one with a window.

    `nodes` finds the node of a page in each group with a window or a state, and `idle_pages` lists
    the pages there that are not held, in the order in which they were released or last found.
    """

    __slots__ = ("dropped_pages", "groups", "idle_pages", "nodes", "page_size", "states", "windows")

    def __init__(self, groups: Sequence[KVGroup], page_size: int) -> None:
        super().__init__()
        self.groups = groups
        self.page_size = page_size
        self.windows = [number for number, group in enumerate(groups) if group.window is not None]
        self.states = [
            number for number, group in enumerate(groups) if group.layout.kind is LayoutKind.STATE
        ]
        partial = (*self.windows, *self.states)
        self.nodes: dict[int, dict[int, Node]] = {group: {} for group in partial}
        self.idle_pages: dict[int, OrderedDict[int, Node]] = {
            group: OrderedDict() for group in partial
        }
        self.dropped_pages: list[list[int]] = [[] for _ in groups]

    def count_reusable(self, pages: Sequence[Sequence[int]]) -> int:
        """After how many of a path's pages a row may continue.

        No window lacks a page there, and each state is there.

        pages: by node, its page in each group
        """
        stop, is_whole = len(pages), False
        while not is_whole:
            is_whole = True
            while stop and not all(pages[stop - 1][group] for group in self.states):
                stop -= 1
            for group in self.windows:
                first = self.groups[group].first_kept_page(stop * self.page_size, self.page_size)
                # Any end behind the missing page, and before this one, would read that page too.
                missing = [at for at in range(first, stop) if not pages[at][group]]
                if missing:
                    stop, is_whole = missing[-1], False
        return stop

    def append_pages(
        self,
        node: Node,
        data: bytes,
        width: int,
        start: int,
        pages: Sequence[list[int]],
        canonical: list[list[int]],
    ) -> Node:
        """As in `Index`; each of `pages` is a list by group, 0 where there is none."""
        for own in pages:
            key = data[start : start + width]
            start += width
            child = node.children.get(key)
            if child is None:
                # Copied: a node writes its list.
                child = node.children[key] = Node(own.copy(), node, key, node.depth + 1)
                self.size += 1
                for group in self.windows:
                    if own[group]:
                        self.nodes[group][own[group]] = child
                canonical.append(own)
            else:
                # As in `Index`, which explains why; a call per page would double the cost.
                if child.refs:
                    child.refs += 1
                    node.refs -= 1
                else:
                    child.refs = 1
                    del self.idle[child]
                canonical.append(self._merge_page(child, own))
            node = child
        return node

    def _merge_page(self, node: Node, own: list[int]) -> list[int]:
        """Return the canonical pages of a row that came to the node with `own`; they are held."""
        kept: list[int] = node.page
        canonical = kept.copy()
        for group in self.states:
            canonical[group] = 0
        for group in self.windows:
            if not own[group]:
                canonical[group] = 0
            elif not kept[group]:
                kept[group] = canonical[group] = own[group]
                self.nodes[group][own[group]] = node
            else:
                self.idle_pages[group].pop(kept[group], None)
        return canonical

    def add_snapshot(self, node: Node, pages: Sequence[int]) -> list[int]:
        """Return the states behind a node: those that it has, or else these.

        pages: by group, 0 where no state is kept
        """
        canonical = list(pages)
        for group in self.states:
            if node.page[group]:
                canonical[group] = node.page[group]
            else:
                node.page[group] = pages[group]
                self.nodes[group][pages[group]] = node
                self.idle_pages[group][pages[group]] = node
        self.note_use(node)
        return canonical

    def note_use(self, node: Node) -> None:
        """Make the states of a node, if it has any, the most recently used ones."""
        for group in self.states:
            if node.page[group]:
                self.idle_pages[group].move_to_end(node.page[group])

    def hold_pages(self, group: int, pages: Sequence[int]) -> None:
        """Remove pages of a window group from those that may be evicted."""
        for page in pages:
            self.idle_pages[group].pop(page, None)

    def release_pages(self, group: int, pages: Sequence[int]) -> None:
        """Let pages of a window group be evicted, after those released before."""
        nodes, idle = self.nodes[group], self.idle_pages[group]
        for page in pages:
            idle[page] = nodes[page]

    def trim_end(self, node: Node) -> Node:
        """As in `Index`: leaves where no match can end; the root if that holds for all."""
        return self._cut_useless(node, self.dropped_pages)

    def cut_leaf(self, node: Node) -> list[int]:
        """As in `Index`; no page of the leaf is indexed any more."""
        pages: list[int] = super().cut_leaf(node)
        for group in self.nodes:
            if pages[group]:
                del self.nodes[group][pages[group]]
                self.idle_pages[group].pop(pages[group], None)
        return pages

    def drop_leaf(self, node: Node) -> None:
        """As in `Index`."""
        del self.idle[node]
        _add_pages(self.dropped_pages, self.cut_leaf(node))

    def evict(self, group: int, count: int) -> list[list[int]]:
        """As in `Index`; useless leaves are removed too, with their pages of all groups."""
        evicted: list[list[int]] = [[] for _ in self.groups]
        dropped = self.dropped_pages[group]
        evicted[group] = dropped[: max(count, 0)]
        del dropped[: max(count, 0)]
        while len(evicted[group]) < count and self.count_evictable(group):
            if group not in self.idle_pages:
                _add_pages(evicted, self.pop_oldest())
                continue
            page, node = self.idle_pages[group].popitem(last=False)
            del self.nodes[group][page]
            node.page[group] = 0
            evicted[group].append(page)
            self._cut_useless(node, evicted)
        return evicted

    def _cut_useless(self, node: Node, pages: list[list[int]]) -> Node:
        """Cut off an unlocked leaf where no match can end, and parents that become such leaves.

        returns: the remaining node    writes: pages, by group
        """
        # Each would keep its pages of the other groups, or stay forever if it has none.
        while (
            node.parent is not None
            and not node.refs
            and not node.children
            and self._is_useless(node)
        ):
            parent = node.parent
            del self.idle[node]
            _add_pages(pages, self.cut_end(node))
            node = parent
        return node

    def _is_useless(self, node: Node) -> bool:
        """Whether no match can end at the node.

        A window that shows its page has lost it, or a state is not there.
        """
        num_tokens = node.depth * self.page_size
        if not all(node.page[group] for group in self.states):
            return True
        return not any(node.page) or any(
            not node.page[group]
            and self.groups[group].first_kept_page(num_tokens, self.page_size) < node.depth
            for group in self.windows
        )

    def count_evictable(self, group: int) -> int:
        """As in `Index`."""
        return len(self.idle_pages.get(group, self.idle)) + len(self.dropped_pages[group])

    def count_pages(self) -> tuple[int, ...]:
        """As in `Index`."""
        return tuple(
            (len(self.nodes[group]) if group in self.nodes else self.size) + len(dropped)
            for group, dropped in enumerate(self.dropped_pages)
        )

    def list_pages(self, group: int) -> list[int]:
        """As in `Index`."""
        pages = [node.page[group] for node in self.iter_nodes() if node.page[group]]
        return pages + self.dropped_pages[group]


def _add_pages(lists: list[list[int]], pages: Sequence[int]) -> None:
    """Add each group's page to its list, if there is one."""
    for numbers, page in zip(lists, pages, strict=True):
        if page:
            numbers.append(page)
