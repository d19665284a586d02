"""Attacks by a project's own user, who has the permissions that `berth permissions` prints (issue 39, A6)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiormq
import pytest
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic

from tests.kit.lent import lent_servers
from tests.system.small import PLAN
from tests.system.test_permissions import MINE, THEIRS, Guarded, Tenant, key_of, tenant

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def system() -> Iterator[Guarded]:
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-attacks-") as name:
        guarded = Guarded(servers, Path(name))
        try:
            guarded.start()
            yield guarded
        finally:
            guarded.processes.stop()


async def dead_lettering(attacker: Tenant, into: str, count: int = 1) -> list[str]:
    """Private queues of a project that pass on each `refused` of its own as a request under this key."""
    arguments = {"x-message-ttl": 0, "x-dead-letter-exchange": "berth", "x-dead-letter-routing-key": into}
    names = []
    for _ in range(count):
        queue = await attacker.channel.declare_queue(exclusive=True, arguments=dict(arguments))
        await queue.bind("berth.events", f"build.event.refused.{attacker.project}")
        await queue.bind("berth.replies", queue.name)
        names.append(queue.name)
    return names


async def refused(attacker: Tenant, instance: str) -> None:
    """Publish a malformed request of one's own that names this instance, and receive its `refused`."""
    await attacker.publish({"instance_uuid": instance, "flavor": 1}, key_of("build.request", attacker.project))
    ended = await attacker.terminal(instance)
    assert (ended["state"], ended["code"]) == ("refused", "message.invalid")


def ends_of(one: Tenant, instance: str) -> list[tuple[Any, Any]]:
    return [(event["state"], event.get("code")) for event in one.events if event["instance_uuid"] == instance]


async def test_a_refusal_that_is_dead_lettered_as_a_request_makes_no_further_one(system: Guarded) -> None:
    """Three private queues made three of each: 58,000 messages in 51 s, and no build of any project in 90 s."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        await dead_lettering(mine, key_of("build.request", MINE), count=3)
        instance = str(uuid.uuid4())
        await refused(mine, instance)
        for one in (theirs, mine):  # each comes behind what the queues have passed on meanwhile
            await one.delete(await one.boot())
        assert ends_of(mine, instance) == [("refused", "message.invalid")]


@pytest.mark.parametrize("key", ["build.request", "build.delete", "instance.move"])
async def test_a_refusal_that_is_dead_lettered_under_anothers_key_is_none_of_his_events(
    system: Guarded, key: str
) -> None:
    """A terminal `refused` for an active build stood in the victim's stream, and its client took it for ended."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        victim = await theirs.boot()
        seen = len(theirs.events)
        await dead_lettering(mine, key_of(key, THEIRS))
        await refused(mine, victim)
        await theirs.delete(await theirs.boot())
        await theirs.delete(await theirs.boot())
        assert [event for event in theirs.events[seen:] if event["instance_uuid"] == victim] == []
        assert (await theirs.delete(victim))["state"] == "deleted"


async def test_a_reply_that_is_dead_lettered_is_no_message(system: Guarded) -> None:
    """A client has its replies sent to such a queue; their bodies it chooses no more than those of events."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        victim = await theirs.boot()
        seen = len(theirs.events)
        (queue,) = await dead_lettering(mine, key_of("build.delete", THEIRS))
        body = {"instance_uuid": victim, "project_id": MINE, "flavor": "m1.small"}
        await mine.publish(body, key_of("build.request", MINE), reply_to=queue, correlation_id="1")
        await theirs.delete(await theirs.boot())
        assert [event for event in theirs.events[seen:] if event["instance_uuid"] == victim] == []
        assert (await theirs.delete(victim))["state"] == "deleted"


@pytest.mark.parametrize("header", ["CC", "BCC"])
@pytest.mark.parametrize("second", [key_of("build.request", THEIRS), "hosts.set", "inventory.forget", "build.query"])
async def test_a_second_key_makes_no_event_and_no_letter(system: Guarded, header: str, second: str) -> None:
    """RabbitMQ 3.10 checks no permission for it: operators' queues had dead letters with a client's bytes."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        letters = await letters_of(system)
        seen = len(theirs.events)
        victim = await theirs.boot()
        body = {"instance_uuid": victim, "flavor": 1}
        with contextlib.suppress(ChannelAccessRefused):
            await mine.publish(body, key_of("build.request", MINE), headers={header: [second]})
            await mine.terminal(victim)
        await theirs.delete(victim)
        assert [event for event in theirs.events[seen:] if event.get("code")] == []
        assert await letters_of(system) == letters


async def letters_of(system: Guarded) -> list[dict[str, Any]]:
    done = await asyncio.to_thread(system.berth, "dead-letters", "list", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


NOISE = 8_000
UNDER_WAY = 6 * 512  # two batches of requests and four of events may be under way, in one line as well


@pytest.mark.parametrize("noise", ["malformed", "unknown flavor"])
async def test_a_quiet_project_is_served_while_a_noisy_ones_requests_wait(system: Guarded, noise: str) -> None:
    """Its boot took 12.8 s beside one noisy connection, and 31 s beside eight."""
    flavor = 1 if noise == "malformed" else "no-such-flavor"
    wanted, mine = {str(uuid.uuid4()) for _ in range(NOISE)}, str(uuid.uuid4())
    async with tenant(system) as noisy, tenant(system, THEIRS) as quiet:
        system.processes.pause("scheduler")
        try:
            await make_noise(system, wanted, flavor)
            request = {"instance_uuid": mine, "project_id": THEIRS, "flavor": "m1.small"}
            await quiet.publish(request, key_of("build.request", THEIRS))
        finally:
            system.processes.resume("scheduler")
        await quiet.first_event(mine)
        behind = wanted - {event["instance_uuid"] for event in noisy.events}
        assert len(behind) > UNDER_WAY, "it was served after the noise"
        assert (await quiet.terminal(mine))["state"] == "active"
        await quiet.delete(mine)
        await noisy.ended(wanted)


async def make_noise(system: Guarded, instances: set[str], flavor: object) -> None:
    """Publish a request for each, and return when the broker has all of them."""
    connection = await aiormq.connect(system.url(f"berth-project-{MINE}"))
    channel = await connection.channel(publisher_confirms=False)
    properties = Basic.Properties(content_type="application/json", delivery_mode=2)
    for instance in instances:
        body = json.dumps({"instance_uuid": instance, "project_id": MINE, "flavor": flavor}).encode()
        key = key_of("build.request", MINE)
        await channel.basic_publish(body, exchange="berth", routing_key=key, properties=properties)
    await channel.basic_qos(prefetch_count=1)  # there and back
    await connection.close()


def test_the_scheduler_has_counted_what_it_dropped(system: Guarded) -> None:
    """The last of this module."""
    log = system.processes.workers["scheduler"].log.read_text()
    assert "message.untrusted_key" in log
    assert log.count("message.untrusted_key") < 20
