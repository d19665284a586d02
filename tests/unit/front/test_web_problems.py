"""Faults as a person in a browser and as a program see them; and readers of an Ironic that does not answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from berth.settings import Settings
from berth.web.application import on_problem
from berth.web.operations import METAL_AGE_S, MetalReader
from berth.web.problems import PROBLEM_JSON, Problem
from bus.faults import RequestTimeout
from bus.port import PublishRefused
from tests.unit.front.world import HandClock

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.mark.parametrize(
    ("path", "accept", "fault", "status", "media_type"),
    [
        ("/drains/x", BROWSER, RequestTimeout("no reply"), 504, "text/html"),
        ("/metal", BROWSER, PublishRefused("full"), 429, "text/html"),
        ("/metal", BROWSER, ZeroDivisionError(), 500, PROBLEM_JSON),  # its page could have the same defect
        ("/metal", "*/*", RequestTimeout("no reply"), 504, PROBLEM_JSON),
        ("/api/v1/metal", BROWSER, RequestTimeout("no reply"), 504, PROBLEM_JSON),
    ],
)
async def test_a_browser_gets_a_page_and_a_program_problem_json(
    path: str, accept: str, fault: Exception, status: int, media_type: str
) -> None:
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"accept", accept.encode())], "state": {}}
    response = await on_problem(Request(scope), fault)
    assert (response.status_code, response.media_type) == (status, media_type)
    assert ("retry-after" in response.headers) is isinstance(fault, PublishRefused)


async def test_those_that_wait_for_an_ironic_out_of_reach_do_not_wait_one_after_the_other() -> None:
    """The second page of metal came after 20 s, the third after 30 s."""
    reads, ends = 0, asyncio.Event()

    async def stored(_: object) -> None:
        nonlocal reads
        reads += 1
        await ends.wait()
        raise RequestTimeout("no reply")

    clock = HandClock()
    reader = MetalReader(Settings(), SimpleNamespace(stored=stored), clock)  # type: ignore[arg-type]
    waiting = [asyncio.create_task(reader.view()) for _ in range(5)]
    await asyncio.sleep(0)
    ends.set()
    faults = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(type(one), getattr(one, "status", 0)) for one in faults] == [(Problem, 504)] * 5
    assert reads == 1
    clock.now += METAL_AGE_S + 1.0
    with pytest.raises(Problem):
        await reader.view()
    assert reads == 2
