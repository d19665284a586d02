"""Trees that their source took out while somebody used them: shells, that go when the last user has gone."""

from __future__ import annotations

from collections.abc import Iterable

from placement_worker.domain.values import Provider


def is_empty_shell(tree: Iterable[Provider]) -> bool:
    """Whether all that is left of a tree was set aside, and nobody uses it any more.

    A tree that has nothing set aside is no shell, however bare: somebody may be about to fill it.
    """
    providers = list(tree)
    stocks = [stock for provider in providers for stock in provider.stocks.values()]
    unused = not any(any(provider.used.values()) for provider in providers)
    return bool(stocks) and unused and all(stock.set_aside for stock in stocks)
