"""A queue of nodes in two parts: what concerns capacity that is taken away goes before what only offers some."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import Generic, TypeVar

V = TypeVar("V")


class NodeLine(Generic[V]):
    """Values by node, in the order in which they came, the urgent ones first. One that comes again is the last."""

    def __init__(self) -> None:
        self._urgent: dict[str, V] = {}
        self._other: dict[str, V] = {}

    def __len__(self) -> int:
        return len(self._urgent) + len(self._other)

    def put(self, node: str, value: V, *, urgent: bool) -> None:
        """Add a node, or move it."""
        self.pop(node)
        (self._urgent if urgent else self._other)[node] = value

    def pop(self, node: str) -> V | None:
        """Take a node out; None: it is not in line."""
        return self._urgent.pop(node) if node in self._urgent else self._other.pop(node, None)

    def get(self, node: str) -> V | None:
        """The value of a node; None: it is not in line."""
        return self._urgent.get(node, self._other.get(node))

    def first(self, most: int) -> Mapping[str, V]:
        """The first nodes, which stay in line."""
        return dict(islice(chain(self._urgent.items(), self._other.items()), most))
