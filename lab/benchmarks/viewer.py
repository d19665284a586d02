"""Looks at a running system: open pages, and a Prometheus that scrapes. `lab.benchmarks.watched` starts it.

    python -m lab.benchmarks.viewer PAGES WEB_URL METRICS_URL ...

A line `page scrape` on standard input opens the pages and scrapes, a line with one of these words does one of them (the
answer is `on` when the pages are open); a line `off` ends both (the answer counts what was read so far: events, maps,
scrapes). Each page Now follows its stream of events, each page Fleet
reads the map every 5 s, each metrics URL is scraped every 5 s, one after the other over those 5 s. Time during which
it does not look does not count, so that however short a turn is, each is read as often a second as by a browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from urllib.parse import urlsplit

import httpx

EVERY_S = 5.0


class Viewer:
    """The pages and the scraper, and how much each has read."""

    def __init__(self, session: httpx.AsyncClient, web: str, metrics: list[str], pages: int) -> None:
        self._session = session
        self._web = web
        self._pages = pages
        self.read: Counter[str] = Counter()
        reads = [("scrapes", url) for url in metrics]
        # The maps between the scrapes, each page at a time of its own.
        for page in range(pages):
            reads.insert((2 * page + 1) * len(metrics) // (2 * pages) + page, ("maps", f"{web}/fleet/map"))
        self._reads = itertools.cycle(reads)
        self._pause_s = EVERY_S / len(reads)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, *, page: bool, scrape: bool) -> None:
        """Begin with the pages, with the scrapes, or with both. Each read keeps its time, whatever else is read."""
        for _ in range(self._pages if page else 0):
            await self._get("pages", f"{self._web}/")
            await self._get("pages", f"{self._web}/fleet")
            opened = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._follow(opened)))
            await opened.wait()
        self._tasks.append(asyncio.create_task(self._repeat({"maps": page, "scrapes": scrape})))

    async def close(self) -> None:
        """Look no longer. Raises what a reader has failed with."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def _follow(self, opened: asyncio.Event) -> None:
        async with self._session.stream("GET", f"{self._web}/now/events") as stream:
            opened.set()
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                self.read["events"] += line.startswith("event:")

    async def _repeat(self, wanted: dict[str, bool]) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            kind, url = next(self._reads)
            if wanted[kind]:
                await self._get(kind, url)

    async def _get(self, kind: str, url: str) -> None:
        await (_scrape(url) if kind == "scrapes" else self._read(url))
        self.read[kind] += 1

    async def _read(self, url: str) -> None:
        (await self._session.get(url)).raise_for_status()


async def _scrape(url: str) -> None:
    """Read one worker's metrics. With httpx it takes a multiple of what the worker takes for the answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        answer = await reader.read(-1)
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"{url}: {answer[:100]!r}")


async def main(pages: int, web: str, metrics: list[str]) -> None:
    """Look from each line with words to the next line `off`, until standard input ends."""
    async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as session:
        viewer = Viewer(session, web, metrics, pages)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await viewer.close()
            if line == "off":
                print(" ".join(f"{count} {kind}" for kind, count in sorted(viewer.read.items())), flush=True)
            else:
                await viewer.open(page="page" in line, scrape="scrape" in line)
                print("on", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
