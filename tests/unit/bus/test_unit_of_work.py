"""The optimistic unit of work: what it caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bus.persistence.unit_of_work import Committed, OptimisticUnitOfWork, VersionCache, WriteSet


class Server:
    """A server's rows; it crashes once it has answered the first write, and loses that."""

    def __init__(self) -> None:
        self.losses = 0
        self.read_keys: list[str] = []

    async def flush(self) -> None:
        raise NotImplementedError

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, str]]:
        self.read_keys += keys
        return dict.fromkeys(keys, (7, "another process's"))

    async def write(self, writes: WriteSet) -> Committed:
        self.losses += 1
        return Committed(7, ())


class Unit(OptimisticUnitOfWork[str, WriteSet]):
    async def put(self, key: str, row: str) -> None:
        await self._read([key])
        self._after[key] = row

    async def row(self, key: str) -> str:
        return (await self._read([key]))[key]


async def test_a_row_of_a_server_that_was_lost_before_its_answer_was_read_is_not_cached() -> None:
    """The server that follows gives the version again, for another row: the cached one would pass as that."""
    server = Server()
    cache: VersionCache[str] = VersionCache(server)
    async with Unit(server, cache, WriteSet(versions={}, outbox=[])) as unit:
        await unit.put("one", "its own")
    server.read_keys.clear()
    assert await Unit(server, cache, WriteSet(versions={}, outbox=[])).row("one") == "another process's"
    assert server.read_keys == ["one"]
