"""A deliberate defect of what ends requests whose clients have stopped waiting is found."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from bus.consuming import in_flight
from lab.simulation.run import run
from scheduler_worker.unanswered import UnansweredRequests
from tests.sim.mutants_of_disks import unwatched
from tests.sim.test_forgotten_builds import requesters_give_up


def requests_end_with_their_requesters() -> AbstractContextManager[Any]:
    """A request that was begun is acknowledged as done when its client has stopped waiting.

    Without the watch of builds, which carries it on, and so mends this.
    """
    patches = ExitStack()
    patches.enter_context(patch.object(in_flight, "ENDED_BY_LETTER", frozenset()))
    patches.enter_context(patch.object(UnansweredRequests, "_open_builds", unwatched))
    return patches


def test_a_request_that_ends_with_its_requester_is_found() -> None:
    with requests_end_with_their_requesters():
        assert run(requesters_give_up(1)).breach == "liveness"
