"""The trial's parts: a stock scheduler's choice by what instances hold, and which calls are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from bus.contracts.placement import LocateRequest
from bus.faults import Fault
from nova_scheduler.cloud.rest import NovaUnavailable
from nova_scheduler.stock.comparison import SchedulerAnswer
from nova_scheduler.trial.app import TrialCalls
from nova_scheduler.trial.stock_choice import NO_HOST, UNSEEN, MirroredInstances, StockChoices
from nova_scheduler.wire.envelope import Call
from nova_scheduler.wire.queues import trial_queue
from tests.unit.nova_scheduler.world import PLENTY, Cloud, request_spec

VMS = ("c0000001-0000-4000-8000-000000000000", "c0000002-0000-4000-8000-000000000000")
Passes = Sequence[Mapping[str, Sequence[int]]]  # of each pass, the hosts on which instances hold something


class Mirror:
    """Shows what it is given, one pass after the other; the last one goes on."""

    def __init__(self, here: Cloud, passes: Passes) -> None:
        self._uuids = here.uuids
        self._passes, self.at = passes, 0
        self.left_out: list[str] = []
        self.read_when_left_out: list[int] = []

    async def next_pass(self) -> None:
        await asyncio.sleep(0)
        self.at = min(self.at + 1, len(self._passes) - 1)
        self.read_when_left_out.append(len(self.left_out))

    def hosts_of(self, consumer: str) -> tuple[str, ...]:
        return tuple(self._uuids[number] for number in self._passes[self.at].get(consumer, ()))

    def is_left_out(self, consumer: str) -> bool:
        return consumer in self.left_out

    def leave_out(self, consumers: Iterable[str]) -> None:
        self.left_out += consumers

    def count_again(self, consumers: Iterable[str]) -> None:
        for one in consumers:
            self.left_out.remove(one)


class Servers:
    """Nova's tasks of servers, one answer after the other; the last one goes on."""

    def __init__(self, *tasks: str | Fault | None) -> None:
        self._tasks = list(tasks)

    async def task_of(self, instance: str) -> str | None:
        found = self._tasks.pop(0) if len(self._tasks) > 1 else self._tasks[0]
        if isinstance(found, Fault):
            raise found
        return found


AWAY = NovaUnavailable("away")
NONE: dict[str, list[int]] = {}

CHOICES: tuple[tuple[str, Passes, tuple[str | Fault | None, ...], list[str] | str], ...] = (
    # name, passes, the first one's task, hosts or why there are none
    ("seen twice", [NONE, {VMS[0]: [1]}, {VMS[0]: [1]}], ("scheduling",), ["h1"]),
    ("seen at once", [{VMS[0]: [1]}], ("scheduling",), ["h1"]),
    ("half seen first", [NONE, {VMS[0]: [0]}, {VMS[0]: [1]}, {VMS[0]: [1]}], ("scheduling",), ["h1"]),
    ("an evacuated server", [{VMS[0]: [2]}, {VMS[0]: [2]}, {VMS[0]: [1, 2]}], ("rebuilding",), ["h1"]),
    ("seen late", [NONE] * 9 + [{VMS[0]: [1]}], ("scheduling",), ["h1"]),
    ("none", [NONE], ("",), NO_HOST),
    ("none after a while, with Nova away", [NONE], ("scheduling", AWAY, "scheduling", ""), NO_HOST),
    ("seen just after Nova had said that none waits", [NONE] * 4 + [{VMS[0]: [1]}], ("",), ["h1"]),
    ("deleted meanwhile", [NONE], (None,), UNSEEN.reason),
    ("being deleted", [NONE], ("deleting",), UNSEEN.reason),
)


@pytest.mark.parametrize(("passes", "tasks", "wanted"), [row[1:] for row in CHOICES], ids=[row[0] for row in CHOICES])
async def test_a_choice_by_what_the_instance_holds(
    passes: Passes, tasks: tuple[str | Fault | None, ...], wanted: list[str] | str
) -> None:
    here = await Cloud([PLENTY] * 3).open()
    choices = StockChoices(Mirror(here, passes), here.facts, Servers(*tasks), clock=here.clock, wait_s=60)
    answer = await choices.choice(VMS[:1], ["h2"], here.clock.monotonic())
    if isinstance(wanted, list):
        assert ([host for host, _ in answer.hosts], answer.is_decided) == (wanted, True)
    else:
        assert (answer.hosts, answer.reason, answer.is_decided) == ((), wanted, wanted == NO_HOST)


async def test_of_several_instances_each_has_a_host_or_none_has() -> None:
    here = await Cloud([PLENTY] * 2).open()
    passes: Passes = [NONE, {VMS[0]: [0]}, {VMS[0]: [0], VMS[1]: [1]}]
    choices = StockChoices(Mirror(here, passes), here.facts, Servers(""), clock=here.clock, wait_s=60)
    answer = await choices.choice(VMS, [], here.clock.monotonic())
    assert [host for host, _ in answer.hosts] == ["h0", "h1"]
    choices = StockChoices(Mirror(here, passes[:2]), here.facts, Servers(None, ""), clock=here.clock, wait_s=60)
    assert await choices.choice(VMS, [], here.clock.monotonic()) == UNSEEN, "the other one was deleted"


async def test_what_is_not_seen_in_time() -> None:
    here = await Cloud([PLENTY]).open()
    choices = StockChoices(Mirror(here, [NONE]), here.facts, Servers("scheduling"), clock=here.clock, wait_s=0)
    assert await choices.choice(VMS[:1], [], here.clock.monotonic()) == UNSEEN


async def test_a_replica_that_is_not_read_in_time_decides_nothing() -> None:
    here = await Cloud([PLENTY]).open()
    mirror = Mirror(here, [NONE])
    mirror.next_pass = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    choices = StockChoices(mirror, here.facts, Servers(""), clock=here.clock, wait_s=0)
    with pytest.raises(TimeoutError):
        async with choices.left_out(VMS[:1]):
            pytest.fail("it was decided")
    assert mirror.left_out == []


async def test_what_is_decided_is_left_out_from_before_a_read_until_it_is_over() -> None:
    here = await Cloud([PLENTY]).open()
    mirror = Mirror(here, [{VMS[0]: [0], VMS[1]: [0]}])
    choices = StockChoices(mirror, here.facts, Servers(""), clock=here.clock, wait_s=60)
    instances = MirroredInstances(mirror)
    asked = [LocateRequest(project_id="p", consumers=VMS)]
    async with choices.left_out(VMS[:1]):
        assert mirror.read_when_left_out == [1]
        (page,) = await instances.locate(asked)
        assert not isinstance(page, Fault) and page.hosts == {VMS[1]: (here.uuids[0],)}
    (page,) = await instances.locate(asked)
    assert not isinstance(page, Fault) and page.hosts.keys() == set(VMS)
    assert isinstance(await instances.usage(["p"]), Fault)


class Started:
    """A comparison that only notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(
        self,
        call: Call,
        stock: Callable[[], Awaitable[SchedulerAnswer]],
        within: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        self.calls.append(call)


HEARD: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("a boot", True, {}),
    ("one that cannot be read, which is told as a failure", True, {"arguments": {"spec_obj": 7}}),
    ("of a version that the scheduler refuses", True, {"version": "9.0"}),
    ("another method", False, {"method": "update_aggregates"}),
    ("a rebuild on its own host", False, {"arguments": {
        "spec_obj": request_spec(scheduler_hints={"_nova_check_type": ["rebuild"]}), "instance_uuids": [VMS[0]],
    }}),
)  # fmt: skip


@pytest.mark.parametrize(("is_compared", "fields"), [row[1:] for row in HEARD], ids=[row[0] for row in HEARD])
async def test_which_calls_are_compared(is_compared: bool, fields: dict[str, Any]) -> None:
    here = await Cloud([PLENTY]).open()
    started = Started()
    choices = StockChoices(Mirror(here, [NONE]), here.facts, Servers(""), clock=here.clock, wait_s=60)
    arguments = {"spec_obj": request_spec(), "instance_uuids": [VMS[0]]}
    call = Call(**{"method": "select_destinations", "version": "4.5", "arguments": arguments, **fields})
    TrialCalls(started, choices, here.clock).heard(call)  # type: ignore[arg-type]
    assert bool(started.calls) is is_compared


def test_the_queue_is_private_and_bounded() -> None:
    queue = trial_queue("nova", "one")
    assert (queue.exclusive, queue.durable, queue.drop_head) == (True, False, True)
    assert queue.max_length and queue.max_bytes and queue.ttl_s
    assert queue.bindings == (("nova", "scheduler"),)
