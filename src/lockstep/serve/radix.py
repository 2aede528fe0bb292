"""The radix cache: a tree over token ids that knows which page holds which prefix. Plain Python over integers.

An edge is one full page of token ids; a chain of edges without branches is one node (path compression).
Keys and values of a token depend on the tokens before it alone (C1, C2), so a page is found by the path to it.
A node that a running sequence reads is locked, and so are the nodes above it; the others may be evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

Key = tuple[int, ...]
"""The token ids of one full page."""


class Node:
    """A run of pages, each under its key. `locks` counts the sequences that read it or a node below it."""

    __slots__ = ("children", "keys", "locks", "pages", "parent", "used")

    def __init__(self, parent: Node | None, keys: list[Key], pages: list[int], used: int) -> None:
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.children: dict[Key, Node] = {}
        self.locks = 0
        self.used = used


class RadixCache:
    """`match` finds, `insert` adds, `lock`/`unlock` protect, `evict` forgets the least recently used leaves.

    Everything that changes keys and values beside the tokens goes into `salt`: equal tokens under different
    salts share nothing.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self.pages = 0
        """Pages in the tree."""
        self.locked = 0
        """Pages of them that a running sequence reads."""

    @property
    def evictable(self) -> int:
        return self.pages - self.locked

    def match(self, keys: list[Key], salt: Hashable = None) -> tuple[Node, list[int]]:
        """The longest prefix of `keys` in the tree: its node (to lock) and its pages."""
        self._clock += 1
        node, pages = self._root(salt), list[int]()
        while len(pages) < len(keys):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            common = _common(child.keys, keys, len(pages))
            node = self._split(child, common) if common < len(child.keys) else child
            node.used = self._clock
            pages += node.pages
        return node, pages

    def insert(self, keys: list[Key], pages: list[int], salt: Hashable = None) -> tuple[Node, list[int]]:
        """Put the path `keys` with its pages into the tree; give its last node and the pages the tree keeps.

        Where the tree has a page already it keeps its own: the caller reads the kept one from now on and
        gives the duplicate back. Pages that were not known belong to the tree from now on.
        """
        node, kept = self.match(keys, salt)
        rest = len(kept)
        if rest == len(keys):
            return node, kept
        child = Node(node, list(keys[rest:]), list(pages[rest:]), self._clock)
        node.children[keys[rest]] = child
        self.pages += len(child.pages)
        return child, kept + child.pages

    def lock(self, node: Node) -> None:
        """A sequence begins to read the path that ends in `node`."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.locked += len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            if walk.locks <= 0:
                raise ValueError("unlock of a node that is not locked")
            walk.locks -= 1
            if walk.locks == 0:
                self.locked -= len(walk.pages)
            walk = walk.parent

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages nobody reads, from the ends of the least recently used leaves."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        gone: list[int] = []
        while leaves and len(gone) < count:
            _, _, leaf = heapq.heappop(leaves)
            while leaf.pages and len(gone) < count:
                gone.append(leaf.pages.pop())
                if len(leaf.keys) > 1:
                    leaf.keys.pop()
            parent = leaf.parent
            if not leaf.pages and parent is not None:
                del parent.children[leaf.keys[0]]
                if parent.parent is not None and not parent.children and not parent.locks:
                    heapq.heappush(leaves, (parent.used, id(parent), parent))
        self.pages -= len(gone)
        self._roots = {salt: root for salt, root in self._roots.items() if root.children or root.locks}
        return gone

    def _root(self, salt: Hashable) -> Node:
        return self._roots.setdefault(salt, Node(None, [], [], 0))

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two and give the upper part; whoever holds `node` holds the lower part, as before."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.keys[:at], node.pages[:at], node.used)
        upper.locks = node.locks
        upper.children[node.keys[at]] = node
        parent.children[upper.keys[0]] = upper
        node.parent, node.keys, node.pages = upper, node.keys[at:], node.pages[at:]
        return upper


def _common(mine: list[Key], other: list[Key], offset: int) -> int:
    """How many keys of `mine` equal those of `other` from `offset` on."""
    limit = min(len(mine), len(other) - offset)
    return next((i for i in range(limit) if mine[i] != other[offset + i]), limit)
