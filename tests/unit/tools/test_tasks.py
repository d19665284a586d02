"""Tasks that are left on a closed loop are named."""

from __future__ import annotations

import asyncio

from tests.kit.tasks import unfinished


def test_a_task_of_a_closed_loop_is_named_once() -> None:
    loop = asyncio.new_event_loop()
    left = loop.create_task(asyncio.Event().wait(), name="left-behind")
    loop.run_until_complete(asyncio.sleep(0))
    assert unfinished() == []
    loop.close()
    (named,) = unfinished()
    assert "left-behind" in named
    assert unfinished() == []
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # this one is left on purpose
