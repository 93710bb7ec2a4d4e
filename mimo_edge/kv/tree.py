"""A radix tree over tokens: which stored prompts begin alike, and where they part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mimo_edge.kv.keys import Tokens, as_tokens

if TYPE_CHECKING:
    from mimo_edge.kv.snapshots import Snapshot


@dataclass(eq=False)
class Node:
    """The tokens from the root to here; `edge` are those behind the parent. A root has no parent and an empty edge."""

    edge: Tokens
    depth: int
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)  # first token of their edge -> child
    snapshot: Snapshot | None = None

    def tokens(self) -> Tokens:
        """All tokens from the root."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1]) if edges else as_tokens([])


class Tree:
    """Every leaf holds a snapshot, and so does every node with a single child, except the root."""

    def __init__(self) -> None:
        self.root = Node(as_tokens([]), 0)

    def walk(self, tokens: Tokens) -> tuple[int, list[Node]]:
        """(how many tokens are in the tree, the nodes entered); the last may lie beyond the point where they part."""
        node, at, path = self.root, 0, [self.root]
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            same = _shared(child.edge, tokens[at : at + len(child.edge)])
            path.append(child)
            at += same
            if same < len(child.edge):
                break
            node = child
        return at, path

    def insert(self, tokens: Tokens) -> Node:
        """The node at exactly these tokens; new ones are made, and an edge is split, as needed."""
        at, path = self.walk(tokens)
        node = path[-1]
        if node.depth > at:
            node = self._split(node, at)
        if at < len(tokens):
            child = Node(tokens[at:].copy(), len(tokens), node)
            node.children[int(tokens[at])] = child
            node = child
        return node

    def prune(self, node: Node) -> None:
        """Restores the class's promise after the node has lost its snapshot."""
        while node.parent is not None and node.snapshot is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and node.snapshot is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = np.concatenate([node.edge, child.edge])
            child.parent = node.parent
            node.parent.children[int(node.edge[0])] = child

    def _split(self, node: Node, depth: int) -> Node:
        parent = node.parent
        assert parent is not None
        cut = depth - parent.depth
        upper = Node(node.edge[:cut].copy(), depth, parent, {int(node.edge[cut]): node})
        parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[cut:].copy(), upper
        return upper


def _shared(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
