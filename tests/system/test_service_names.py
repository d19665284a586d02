"""Two real compute services of one name, as a careless `berth run compute` starts them: the second one must not run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from berth.trial.worker_processes import Worker
from bus.service.main import EXIT_SETTINGS
from tests.system.small import Small, small_processes

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

FIRST = "compute-cell1-c1"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with small_processes() as made:
        yield made


def second(small: Small, name: str, *, wait_s: float) -> Worker:
    settings = {"BERTH_COMPUTE__NAME_WAIT_S": str(wait_s)}
    arguments = small.processes.workers[FIRST].arguments
    return small.processes.start(name, *arguments, settings=settings)


def until(condition: Callable[[], object], worker: Worker) -> None:
    """Another process's state: there is no event to wait for."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, worker.process.tail()
        time.sleep(0.05)


def test_the_second_service_of_a_name_ends_with_a_sentence_and_the_first_goes_on(small: Small) -> None:
    late = second(small, "late", wait_s=1.0)
    until(lambda: not late.process.running, late)
    log = late.log.read_text()
    assert late.process.status == EXIT_SETTINGS, log
    assert "another process runs the compute service 'c1' of cell1" in log.replace("cell1-c1", "c1"), log
    assert "compute.name_taken" in log and "Traceback" not in log
    assert small.processes.workers[FIRST].process.running
    small.ready(FIRST)


def test_a_service_that_is_started_before_the_former_one_is_gone_takes_over(small: Small) -> None:
    """A supervisor starts the next one while the broker still has the connection of the one that died."""
    next_one = second(small, "next", wait_s=PATIENCE_S)
    until(lambda: "compute.name_waits" in next_one.log.read_text(), next_one)
    small.processes.kill(FIRST)
    asyncio.run(small.processes.ready(["next"]))
