"""The client that `berth` is: follows its builds to their ends, and queries when it receives nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from berth import client as client_module
from berth.commands.instances import publish_and_follow
from berth.load import LoadPlan, draw_requests
from bus.contracts.build import BuildEvent, BuildRecord, BuildRequest, BuildState
from bus.port import BusUnavailable, PublishRefused
from bus.retrying import CLIENT_PUBLISH
from bus.tracing.context import Span
from bus.tracing.tracer import Tracer
from tests.unit.front.world import ClientWorld


def requests(count: int) -> list[BuildRequest]:
    return draw_requests(LoadPlan(boots=count, mix={"f": 1.0}), random.Random(7))


def record(request: BuildRequest, state: BuildState) -> BuildRecord:
    return BuildRecord(
        instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=request.flavor, state=state
    )


class _Nowhere:
    """An exporter that is not called."""

    async def export(self, spans: Sequence[Span]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.01)


async def test_builds_are_followed_to_their_ends(client_world: ClientWorld) -> None:
    tracks = await client_world.client.boot(requests(5))
    assert await client_world.client.wait(20)
    assert [track.state for track in tracks] == ["active"] * 5
    assert client_world.client.unfinished == 0 and len(client_world.client.events) == 5


async def test_a_client_without_the_tracer_that_it_had_begins_no_trace(client_world: ClientWorld) -> None:
    """Benchmarks do so to compare. The client had kept the tracer, and its requests were traced in both turns."""
    client = client_world.client
    tracer = Tracer(_Nowhere(), ratio=1.0, most_per_s=1000.0, rng=random.Random(1), monotonic=lambda: 1.0)
    for one, begun in ((tracer, 1), (None, 1), (tracer, 2)):
        client.bus.tracer = one
        await client.boot(draw_requests(LoadPlan(boots=1, mix={"f": 1.0}), random.Random(begun + (one is None) * 10)))
        assert await client.wait(20)
        assert len(tracer._spans) == begun


async def test_item_7_an_event_of_another_project_ends_no_build_of_ours(client_world: ClientWorld) -> None:
    """Any project may name our uuid in a request of its own, and is answered that this was refused."""
    client_world.answer_at_once = False
    (track,) = await client_world.client.boot(requests(1))
    forged = BuildEvent(
        instance_uuid=track.instance_uuid, project_id="evil", state=BuildState.REFUSED, sequence=99, terminal=True
    )
    await client_world.scheduler.publish(forged)
    await until(lambda: client_world.client.foreign_events == 1)
    assert (track.state, client_world.client.unfinished) == ("requested", 1)


async def test_a_delete_that_was_given_up_ends_though_its_event_has_no_number(client_world: ClientWorld) -> None:
    """Its build's events have numbers already; a chaos run waited for the delete's end for ever."""
    (track,) = await client_world.client.boot(requests(1))
    assert await client_world.client.wait(20)
    client_world.answer_at_once = False
    (deleting,) = await client_world.client.delete([record(requests(1)[0], BuildState.ACTIVE)])
    assert deleting.instance_uuid == track.instance_uuid
    progress = BuildEvent(
        instance_uuid=track.instance_uuid, project_id=track.project_id, state=BuildState.DELETING, sequence=20
    )
    given_up = msgspec.structs.replace(progress, state=BuildState.REFUSED, sequence=0, terminal=True)
    await client_world.scheduler.publish_all([(event, "") for event in (progress, given_up, given_up)])
    await until(lambda: deleting.repeats == 1)
    assert (deleting.state, deleting.terminals, client_world.client.unfinished) == ("refused", 1, 0)


async def test_a_delete_ends_with_deleted_though_a_crashed_database_numbers_anew(client_world: ClientWorld) -> None:
    """The client had events that the cell's database forgot in a crash: the last event has a lower number then."""
    (request,) = requests(1)
    client_world.answer_at_once = False
    (track,) = await client_world.client.delete([record(request, BuildState.ACTIVE)])
    await client_world.notify(request, BuildState.ACTIVE, 15)
    await client_world.notify(request, BuildState.DELETED, 13)
    await client_world.notify(request, BuildState.DELETED, 13)
    await until(lambda: track.repeats == 1)
    assert (track.state, track.terminals, track.sequence, client_world.client.unfinished) == ("deleted", 1, 15, 0)


async def test_of_many_builds_it_is_known_which_were_accepted_before_the_queue_was_full(
    client_world: ClientWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """`berth boot --count 20000` ended with an error, and machines whose uuids were lost."""
    client_world.answer_at_once = False
    client_world.full = {2, 3, 4}
    with pytest.raises(PublishRefused):
        await publish_and_follow(
            client_world.client, requests(1200), timeout_s=2 * CLIENT_PUBLISH.first_s, as_json=True
        )
    accepted = [track for track in client_world.client.tracks.values() if track.published_at is not None]
    assert len(accepted) == 1000
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert [one["instance_uuid"] for one in shown] == [track.instance_uuid for track in accepted]


async def test_many_builds_wait_for_a_full_queue_to_have_room(client_world: ClientWorld) -> None:
    client_world.full = {2, 3}
    tracks = await publish_and_follow(client_world.client, requests(1200), timeout_s=20.0, as_json=True)
    assert all(track.published_at is not None for track in tracks) and len(tracks) == 1200


async def test_an_event_that_was_missed_is_requested(client_world: ClientWorld) -> None:
    client_world.mute = True
    (track,) = await client_world.client.boot(requests(1))
    assert await client_world.client.wait(20)
    assert (track.state, track.last) == ("active", None)
    assert client_world.queries >= 1


async def test_an_event_that_arrives_after_its_end_was_queried_is_no_second_end(client_world: ClientWorld) -> None:
    """A broker that fails over holds an event for seconds; the client has queried the record by then."""
    client_world.mute = True
    ends: list[str] = []
    client_world.client.on_end(lambda track: ends.append(track.state))
    (request,) = requests(1)
    (track,) = await client_world.client.boot([request])
    assert await client_world.client.wait(20)
    client_world.mute = False
    await client_world.notify(request, BuildState.ACTIVE, 3)
    await until(lambda: track.last is not None)
    assert (track.state, track.terminals, ends) == ("active", 1, ["active"])
    await client_world.notify(request, BuildState.ACTIVE, 4)
    await until(lambda: track.sequence == 4)
    assert track.terminals == 2, "another end than the one on record is counted"


async def test_a_repeated_or_late_event_changes_nothing(client_world: ClientWorld) -> None:
    client_world.answer_at_once = False
    (request,) = requests(1)
    (track,) = await client_world.client.boot([request])
    await client_world.notify(request, BuildState.ACTIVE, 12)
    await client_world.notify(request, BuildState.ACTIVE, 12)
    await client_world.notify(request, BuildState.BUILDING, 10, terminal=False)
    await until(lambda: track.repeats == 2)
    assert (track.terminals, track.state) == (1, "active")


async def test_a_delete_ends_when_the_machine_is_gone_and_not_before(client_world: ClientWorld) -> None:
    """The build that it overtakes may still end first."""
    (request,) = requests(1)
    client_world.answer_at_once = False
    client_world.records[request.instance_uuid] = record(request, BuildState.BUILDING)
    (track,) = await client_world.client.delete([record(request, BuildState.BUILDING)])
    await client_world.notify(request, BuildState.ACTIVE, 12)
    assert not await client_world.client.wait(0.0)
    await client_world.notify(request, BuildState.DELETED, 15)
    await until(lambda: track.ended_at is not None)
    assert track.state == "deleted"


async def test_a_delete_of_what_is_gone_has_ended(client_world: ClientWorld) -> None:
    (request,) = requests(1)
    (track,) = await client_world.client.delete([record(request, BuildState.DELETED)])
    assert await client_world.client.wait(0.0)
    assert track.state == "deleted"


async def test_with_patience_an_outage_only_delays(client_world: ClientWorld) -> None:
    publish = client_world.client.bus.publish_each
    failures = 3

    async def unavailable(messages):  # type: ignore[no-untyped-def]
        nonlocal failures
        failures -= 1
        if failures >= 0:
            return [BusUnavailable("unavailable")] * len(messages)
        return await publish(messages)

    client_world.client.bus.publish_each = unavailable  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable):
        await client_world.client.boot(requests(1))
    later = requests(3)[1:]
    tracks = await client_world.client.boot(later, retry_for_s=60.0)
    await until(lambda: all(track.ended_at is not None for track in tracks))
    assert failures < 0
