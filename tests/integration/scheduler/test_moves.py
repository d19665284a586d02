"""Moves at the top: what is refused, where an instance may go, and one terminal event a request."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import CLOCKS_APART_S, new_uuid
from bus.contracts.base import encode
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import routing_key
from bus.contracts.cell import Selection
from bus.contracts.deploy import ImageSource
from bus.contracts.moves import (
    AskedBy,
    CellAsks,
    CellBook,
    CellCheck,
    CellMove,
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MachineChanged,
    MoveAccepted,
    MoveKind,
    MoveRequest,
    MoveState,
    ResizePolicy,
)
from bus.contracts.operations import AdminState, AdminStateSet, EvacuationPolicy, SetAdminState
from bus.contracts.placement import GroupPolicy, Release, ReleaseResult, ServerGroup
from bus.contracts.queues import COMMANDS
from bus.port import Outgoing
from scheduler_worker.config import Flavor, SchedulerConfig
from tests.integration.scheduler.steps import DONE, WARM, code_of, one_active, refused
from tests.integration.scheduler.world import World
from tests.kit.waiting import PATIENCE_S, until

pytestmark = pytest.mark.postgres
OF_IMAGES = replace(WARM, enabled_filters=("ComputeFilter", "ImagePropertiesFilter"))


async def test_a_copy_of_a_move_is_late_by_the_clocks_as_well(world: World) -> None:
    """How long it has waited as an earlier copy is not known: it was begun whenever a scheduler was there again."""
    request = await one_active(world)
    late = world.move(request, MoveKind.REBUILD, image="a")
    sent_at = world.clock.time() - PATIENCE_S - CLOCKS_APART_S - 1.0
    headers = {"berth-attempt": 1, "berth-sent-at-ms": int(sent_at * 1000)}
    copy = Outgoing(
        exchange=COMMANDS,
        routing_key=routing_key(late),
        body=encode(late),
        headers={**headers, "berth-patience-ms": int(PATIENCE_S * 1000)},
        reply_to="client.reply.gone",
    )
    await world.buses[API].transport.publish(copy)
    other = world.move(request, MoveKind.REBUILD, image="b")
    await world.answer(other, MoveAccepted)  # else one is under way
    await world.dispatched(other)


async def test_a_move_that_expired_at_the_broker_is_carried_out_when_its_client_repeats_it(world: World) -> None:
    request = await one_active(world)
    move = world.move(request, MoveKind.REBUILD, image="a")
    await world.expires(move, patience_s=10.0)
    await world.until_expired_are_handled()
    await world.answer(move, MoveAccepted)
    await world.dispatched(move)
    assert not [event for event in world.move_events if event.request_id == move.request_id and event.terminal]


async def test_a_migration_goes_to_other_hosts_of_the_cell_and_has_one_end(world: World) -> None:
    built = await one_active(world)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    move = world.move(built, MoveKind.MIGRATE)
    await world.answer(move, MoveAccepted)
    command = await world.dispatched(move)
    assert {one.host for one in command.selections} == {"c1-0", "c1-1", "c1-2"} - {source}
    assert command.spec is not None and command.spec.flavor == built.flavor and command.step_timeout_s == 300.0
    answer = await world.moved(move, MoveState.SCHEDULED)
    assert (answer.host, answer.cell, answer.condition) == (command.selections[0].host, "c1", Condition.MOVING)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way == move.request_id and record.host == source
    # Another request is refused while this one is under way, an abort is not.
    assert await refused(world, world.move(built, MoveKind.STOP)) == "instance.busy"
    abort = world.move(built, MoveKind.ABORT)
    await world.commanded(abort)
    await world.move_announced("c1", abort, MoveState.DONE, 13, **DONE)
    await world.moved(abort)
    target = command.selections[0].host
    for _ in range(2):
        await world.move_announced(
            "c1", move, MoveState.DONE, 15, **{**DONE, "condition": Condition.RESIZED}, host=target
        )
    await world.move_announced("c1", move, MoveState.FINISHING, 14, host=target)
    await world.moved(move)
    confirm = world.move(built, MoveKind.CONFIRM)
    assert (await world.commanded(confirm)).selections == ()
    await world.move_announced("c1", confirm, MoveState.DONE, 17, **DONE, host=target)
    await world.moved(confirm)
    ends = [event.state for event in world.move_events if event.request_id == move.request_id and event.terminal]
    assert ends == [MoveState.DONE]
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.host, record.under_way, record.condition) == (target, None, "active")
    what = [line.what for line in record.timeline if " " in line.what]
    assert what[0] == "migrate scheduled" and what[-1] == "confirm done" and what.count("migrate done") == 1


async def test_the_same_request_twice_moves_once_and_other_content_is_refused(world: World) -> None:
    built = await one_active(world)
    move = world.move(built, MoveKind.STOP)
    await world.ask(*[move] * 10)
    await world.scheduler("s2", WARM)
    await world.ask(*[move] * 10)
    await world.dispatched(move)
    await world.answer(move, MoveAccepted)
    other = world.move(built, MoveKind.START, request_id=move.request_id)
    assert await code_of(world.answer(other, MoveAccepted)) == "request.duplicate"
    answer = await until(lambda: [e for e in world.move_events if e.code == "request.duplicate"])
    assert [(event.sequence, event.kind) for event in answer] == [(0, MoveKind.START)]
    assert [one.kind for _, one in world.moves] == [MoveKind.STOP]
    mine = world.move(built, MoveKind.STOP, request_id=built.instance_uuid)
    assert await code_of(world.answer(mine, MoveAccepted)) == "request.duplicate"


async def test_what_cannot_be_requested_is_refused_with_a_code(world: World) -> None:
    built = await one_active(world)
    asleep = await world.scheduled()
    unknown = world.request()
    codes = {
        "instance.unknown": world.move(unknown, MoveKind.STOP),
        "instance.not_active": world.move(asleep, MoveKind.STOP),
        "request.incomplete": world.move(built, MoveKind.RESIZE),
        "flavor.unknown": world.move(built, MoveKind.RESIZE, flavor="nope"),
        "flavor.same": world.move(built, MoveKind.RESIZE, flavor="m1.small"),
        "resize.same_host": world.move(built, MoveKind.RESIZE, flavor="m1.large", policy=ResizePolicy.SAME_HOST),
        "host.not_fenced": world.move(built, MoveKind.EVACUATE, fenced=True),
    }
    for code, move in codes.items():
        assert await refused(world, move) == code
        assert await refused(world, replace(move)) == code  # and again
    assert await refused(world, world.move(built, MoveKind.RESCUE)) == "request.incomplete"
    foreign = world.move(built, MoveKind.STOP, project_id="other")
    assert await refused(world, foreign) == "instance.unknown"
    answer = await world.moved(foreign)
    assert (answer.project_id, answer.flavor, answer.condition) == ("other", "", Condition.UNKNOWN)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way is None


async def test_a_shelved_instance_is_unshelved_on_a_named_host_only_once_it_is_offloaded(world: World) -> None:
    built = await one_active(world)
    shelve = world.move(built, MoveKind.SHELVE)
    await world.commanded(shelve)
    await world.move_announced("c1", shelve, MoveState.DONE, 15, terminal=True, condition=Condition.SHELVED)
    await world.moved(shelve)
    assert await refused(world, world.move(built, MoveKind.UNSHELVE, host="c1-0")) == "instance.not_offloaded"
    unshelve = world.move(built, MoveKind.UNSHELVE)
    assert (await world.commanded(unshelve)).selections == ()


async def test_an_unreadable_request_is_answered_on_the_stream_of_its_project(world: World) -> None:
    built = await one_active(world)
    move = world.move(built, MoveKind.STOP)
    transport = world.buses[API].transport
    sent: list[Outgoing] = []
    publish = transport.publish

    async def watch(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    transport.publish = watch  # type: ignore[method-assign]
    await world.commanded(move)
    good = sent[0]
    other = new_uuid(world.rng)
    body = good.body.replace(move.request_id.encode(), other.encode())
    for bad, kind in (
        (body.replace(b'"stop"', b'"stopp"'), None),
        (body.replace(b'"kind"', b'"hostt":"x","kind"'), MoveKind.STOP),
    ):
        before = len(world.move_events)
        await publish(replace(good, body=bad))
        (answer,) = await until(lambda before=before: world.move_events[before:])  # type: ignore[misc]
        assert (answer.request_id, answer.state, answer.kind) == (other, MoveState.REFUSED, kind)
        assert answer.terminal and answer.sequence == 0 and answer.code == "message.invalid"


async def test_a_host_is_named_through_the_filters_and_no_host_is_explained(world: World) -> None:
    built = await one_active(world)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    named = next(name for name in ("c1-0", "c1-1", "c1-2") if name != source)
    for host, step in ((source, "claim"), ("c2-0", "cell")):
        move = world.move(built, MoveKind.LIVE_MIGRATE, host=host)
        await world.ask(move)
        answer = await world.moved(move)
        assert (answer.state, answer.code) == (MoveState.FAILED, "no_valid_host")
        assert [one.step for one in answer.funnel if one.rejected and not one.remaining][-1] == step
    move = world.move(built, MoveKind.LIVE_MIGRATE, host=named)
    assert [one.host for one in (await world.commanded(move)).selections] == [named]


async def test_a_resize_counts_what_it_holds_once_where_the_site_allows_the_same_host(world: World) -> None:
    await world.scheduler_and_hosts(
        1, replace(WARM, allow_resize_to_same_host=True), VCPU=4, MEMORY_MB=8192, DISK_GB=80
    )
    built = world.request("m1.small")
    await world.active(built)
    move = world.move(built, MoveKind.RESIZE, flavor="m1.large")  # all of the host
    command = await world.commanded(move)
    assert [one.host for one in command.selections] == ["c1-0"]
    assert command.spec is not None and command.spec.flavor == "m1.large"
    await world.move_announced("c1", move, MoveState.DONE, 20, **DONE, host="c1-0", flavor="m1.large")
    await world.moved(move)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.flavor == "m1.large"
    again = world.move(built, MoveKind.RESIZE, flavor="m1.large")
    assert await refused(world, again) == "flavor.same"
    assert command.expected_flavor == ""
    rebuild = world.move(built, MoveKind.REBUILD, image="other")
    assert (await world.commanded(rebuild)).expected_flavor == "m1.large"


async def announce_modes(world: World, modes: dict[str, str]) -> None:
    """Announce the VM modes that hosts support ({name: modes}); wait until the scheduler knows them."""
    for uuid, host in world.hosts["c1"].items():
        triples = ",".join(f"x86_64/kvm/{mode}" for mode in modes[host.name].split())
        world.hosts["c1"][uuid] = replace(host, attributes={"supported_instances": triples})
    await world.announce("c1")
    await until(lambda: any("supported_instances" in one for one in world.tables["s1"].attributes))


async def test_a_rebuild_is_checked_by_the_filters_that_look_at_images_and_by_no_other(world: World) -> None:
    """The instance stays on its host, so what is free there, and whether the host is disabled, does not matter."""
    built = await one_active(world, 1, OF_IMAGES)
    await announce_modes(world, {"c1-0": "hvm"})
    command = SetAdminState(host="c1-0", state=AdminState.DISABLED, reason="full", by="ann")
    await world.answer(command, AdminStateSet)
    other = world.move(built, MoveKind.REBUILD, image="xen", image_properties={"hw_vm_mode": "xen"})
    assert await refused(world, other) == "image.unsuitable"
    answer = await world.moved(other)
    assert [(one.step, one.rejected) for one in answer.funnel] == [
        ("ImagePropertiesFilter", {"image.not_supported": 1})
    ]
    assert answer.condition is Condition.ACTIVE and "c1-0" in answer.reason
    fits = world.move(built, MoveKind.REBUILD, image="new", image_properties={"hw_vm_mode": "hvm"})
    assert (await world.commanded(fits)).selections == ()


@pytest.mark.parametrize(
    ("word", "traits", "is_refused"),
    [
        ("required", ("CUSTOM_B",), True),
        ("required", ("CUSTOM_A",), False),
        ("forbidden", ("CUSTOM_A",), True),
        ("forbidden", ("CUSTOM_B",), False),
        ("perhaps", ("CUSTOM_A",), True),
    ],
)
async def test_a_rebuild_is_held_to_the_traits_of_its_image(
    world: World, word: str, traits: tuple[str, ...], is_refused: bool
) -> None:
    """Nova's rule. An instance of an image that its host cannot carry would have no host to move to, either."""
    built = await one_active(world, 1)
    ((host, _),) = world.hosts["c1"].items()
    await world.report(host, "c1-0", {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, traits)
    book = world.replicas["s1"]
    await until(lambda: book.traits_of(book.row_of(host)) == traits)
    rebuild = world.move(built, MoveKind.REBUILD, image="new", image_properties={"trait:CUSTOM_A": word})
    if is_refused:
        assert await refused(world, rebuild) == "image.unsuitable"
    else:
        assert (await world.commanded(rebuild)).selections == ()


async def test_an_instance_moves_by_the_properties_of_the_image_that_it_was_rebuilt_from(world: World) -> None:
    built = await one_active(world, config=OF_IMAGES)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    fitting, other = (name for name in ("c1-0", "c1-1", "c1-2") if name != source)
    await announce_modes(world, {str(source): "xen hvm", fitting: "hvm", other: "xen"})
    for number, mode, state in ((1, "hvm", MoveState.DONE), (2, "xen", MoveState.FAILED)):
        rebuild = world.move(built, MoveKind.REBUILD, image=mode, image_properties={"hw_vm_mode": mode})
        await world.commanded(rebuild)
        await world.move_announced("c1", rebuild, state, 20 * number, **DONE, host=source, image="hvm")
        await world.moved(rebuild)
    move = world.move(built, MoveKind.MIGRATE)
    assert [one.host for one in (await world.commanded(move)).selections] == [fitting]


async def test_a_cell_is_told_the_whole_flavor_that_hosts_were_chosen_for_and_the_image_of_a_rebuild(
    world: World,
) -> None:
    """It was told the flavor's name: the driver went by the root disk, traits and capabilities of the old one."""
    larger = Flavor(
        vcpus=2,
        memory_mb=2048,
        disk_gb=20,
        extra_specs={"capabilities:boot_mode": "uefi", "berth:on_host_failure": "fail"},
    )
    config = replace(WARM, flavors={**WARM.flavors, "larger": larger}, enabled_filters=("ComputeFilter",))
    first = ImageSource(source="http://images/first")
    built = await one_active(world, config=config, image="a", image_source=first)
    number = 11
    for kind, more in (
        (MoveKind.RESIZE, {"flavor": "larger"}),
        (MoveKind.MIGRATE, {}),
        (MoveKind.REBUILD, {"image": "b", "image_source": ImageSource(source="http://images/second")}),
        (MoveKind.STOP, {}),
    ):
        move = world.move(built, kind, **more)
        spec = (await world.commanded(move)).spec
        if kind is MoveKind.STOP:
            assert spec is None
            break
        assert spec is not None
        assert (spec.flavor, spec.root_gb, spec.capabilities) == ("larger", 20, {"boot_mode": "uefi"})
        assert spec.on_host_failure is EvacuationPolicy.FAIL
        if kind is MoveKind.REBUILD:
            assert (spec.image, spec.image_source) == ("b", ImageSource(source="http://images/second"))
        number += 10
        source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
        await world.move_announced("c1", move, MoveState.DONE, number, **DONE, host=source, flavor="larger", image="a")
        await world.moved(move)


async def test_members_that_keep_apart_keep_apart_when_they_move(world: World) -> None:
    group = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.ANTI_AFFINITY)
    built = await one_active(world, server_group=group)
    other = world.request(server_group=group)
    other_host = await world.active(other)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    move = world.move(built, MoveKind.MIGRATE)
    command = await world.commanded(move)
    assert {one.host for one in command.selections} == {"c1-0", "c1-1", "c1-2"} - {source, other_host}
    assert command.server_group == group


async def test_an_evacuation_needs_a_host_that_an_operator_has_fenced(world: World) -> None:
    built = await one_active(world)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    assert source is not None
    command = SetAdminState(host=source, state=AdminState.FENCED, reason="dead", by="ann", force=True)
    await world.answer(command, AdminStateSet)
    move = world.move(built, MoveKind.EVACUATE, fenced=True)
    answer = await world.commanded(move)
    assert answer.fenced and source not in {one.host for one in answer.selections}


async def test_moves_of_one_moment_spread_over_hosts_without_a_claim(world: World) -> None:
    """Nothing is claimed above: what was chosen counts as used until the cell has claimed it."""
    await world.scheduler_and_hosts(1, WARM, VCPU=8, MEMORY_MB=16384, DISK_GB=160)
    builds = [world.request("m1.small") for _ in range(4)]
    for one in builds:
        await world.active(one)
    await world.add_hosts("c1", 4, VCPU=1, MEMORY_MB=2048, DISK_GB=20)
    moves = [world.move(one, MoveKind.MIGRATE, max_attempts=1) for one in builds]
    await world.ask(*moves)
    chosen = [(await world.dispatched(move)).selections for move in moves]
    assert sorted(one.host for (one,) in chosen) == ["c1-1", "c1-2", "c1-3", "c1-4"]


async def test_an_instance_that_is_deleted_takes_no_move_and_a_move_does_not_stop_a_delete(world: World) -> None:
    built = await one_active(world)
    move = world.move(built, MoveKind.MIGRATE)
    await world.commanded(move)
    await world.delete(built)
    await until(lambda: world.deletes)
    assert await refused(world, world.move(built, MoveKind.STOP)) == "instance.not_active"
    await world.move_announced("c1", move, MoveState.FAILED, 20, terminal=True, condition=Condition.DELETED, code="x")
    await world.announced("c1", built, BuildState.DELETED, 21, terminal=True)
    await world.ended(built.instance_uuid, BuildState.DELETED)
    assert (await world.moved(move)).state is MoveState.FAILED


async def test_a_scheduler_killed_at_any_moment_loses_and_doubles_no_move(world: World) -> None:
    built = await one_active(world, hosts=4)
    others = [world.request() for _ in range(5)]
    for one in others:
        await world.active(one)
    moves = [world.move(one, MoveKind.STOP) for one in (built, *others)]
    for at, move in enumerate(moves):
        await world.ask(move)
        for _ in range(20 * at):  # another moment each time
            await asyncio.sleep(0)
        await world.kill("s1")
        await world.scheduler("s1", WARM)
    for move in moves:
        await world.dispatched(move)
        await world.moved(move, MoveState.SCHEDULED)
    last = world.move(others[0], MoveKind.ABORT)
    await world.commanded(last)
    sent = [one.request_id for _, one in world.moves]
    assert {one.request_id for one in moves} <= set(sent)
    record = await world.show(built.instance_uuid)
    assert record is not None and [line.what for line in record.timeline].count("stop scheduled") == 1


async def test_what_was_chosen_for_the_last_move_is_offered_again_soon(world: World) -> None:
    """Only the next move released it: at rest a host of this scheduler seemed fuller than it was, for ever."""
    built = await one_active(world, config=SchedulerConfig(hosts_warmup_s=0.001, choice_held_s=0.05))
    move = world.move(built, MoveKind.MIGRATE)
    await world.answer(move, MoveAccepted)
    await world.dispatched(move)
    await until(lambda: move.request_id not in list(world.replicas["s1"].assumptions.keys()))
    assert [one.request_id for _, one in world.moves] == [move.request_id], "given back, and not sent once more"


async def test_room_beside_a_claimed_move_is_given_to_builds(world: World) -> None:
    """It counted twice for five seconds: as claimed, and as chosen; eight of eight builds behind a drain failed."""
    hosts = await world.scheduler_and_hosts(2, replace(WARM, choice_held_s=600.0), VCPU=2, MEMORY_MB=8192, DISK_GB=100)
    built = world.request()
    await world.active(built)
    move = world.move(built, MoveKind.LIVE_MIGRATE)
    await world.claim_destination(await world.commanded(move))
    book = world.replicas["s1"]
    await until(lambda: [book.inventory_of(book.row_of(one))["VCPU"][1] for one in hosts] == [1, 1])
    builds = [world.request(), world.request()]
    await world.ask(*builds)
    for build in builds:
        assert (await world.ended(build.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED)).state == "scheduled"


async def test_no_build_ends_without_a_host_for_what_a_move_has_chosen(world: World) -> None:
    """The move's cell may never claim it; and where it has, the build's claim is turned down by the book."""
    await world.scheduler_and_hosts(2, replace(WARM, choice_held_s=600.0), VCPU=1, MEMORY_MB=8192, DISK_GB=100)
    built = world.request()
    await world.active(built)
    move = world.move(built, MoveKind.LIVE_MIGRATE)
    await world.commanded(move)
    build = await world.requested()
    assert (await world.ended(build.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED)).state == "scheduled"


async def to_be_unshelved_elsewhere(world: World, config: SchedulerConfig) -> tuple[BuildRequest, MoveRequest]:
    """An offloaded instance of c1, and a request to unshelve it on the host of c2."""
    built = await one_active(world, config=config)
    shelve = world.move(built, MoveKind.SHELVE, offload=True)
    await world.commanded(shelve)
    await world.move_announced("c1", shelve, MoveState.DONE, 15, terminal=True, condition=Condition.OFFLOADED)
    await world.moved(shelve)
    return built, world.move(built, MoveKind.UNSHELVE, host="c2-0")


def departure_of(leaving: CellMove) -> Departure:
    """As its cell announces it to the one that the instance leaves for."""
    assert leaving.spec is not None
    last = Selection(
        host_uuid=leaving.instance_uuid,
        host="c1-0",
        service="compute-c1",
        allocations={leaving.request_id: {"VCPU": 1}},
    )
    return Departure(
        cell="c2",
        spec=leaving.spec,
        image="snapshot",
        last=last,
        selections=leaving.selections,
        newest=4,
        sequence=16,
    )


def book_question(move: MoveRequest) -> CellAsks:
    """The cell asks placement, by way of the schedulers, to release what the move has claimed elsewhere."""
    asked = AskedBy(cell="c1", request_id=move.request_id)
    question = Release(consumer=move.instance_uuid, attempt=1000)
    return CellAsks(message=CellBook(asked_by=asked, instance_uuid=move.instance_uuid, question=question))


async def test_an_offloaded_instance_is_unshelved_in_its_own_cell_unless_moves_across_cells_are_allowed(
    world: World,
) -> None:
    _, move = await to_be_unshelved_elsewhere(world, WARM)
    await world.ask(move)
    assert (await world.moved(move)).state is MoveState.FAILED


async def test_its_own_cell_is_preferred_to_a_cell_with_far_more_room(world: World) -> None:
    built, _ = await to_be_unshelved_elsewhere(world, replace(WARM, moves_across_cells=True))
    await world.add_hosts("c2", 3, VCPU=512, MEMORY_MB=4_194_304, DISK_GB=65_536)
    move = world.move(built, MoveKind.UNSHELVE)
    staying = await world.commanded(move)
    assert (staying.to_cell, [cell for cell, one in world.moves if one == staying]) == (None, ["c1"])
    assert {one.host.partition("-")[0] for one in staying.selections} == {"c1"}


async def test_an_offloaded_instance_leaves_for_the_cell_that_has_a_host(world: World) -> None:
    built, move = await to_be_unshelved_elsewhere(world, replace(WARM, moves_across_cells=True))
    leaving = await world.commanded(move)
    assert (leaving.to_cell, [one.host for one in leaving.selections], leaving.arrival) == ("c2", ["c2-0"], None)
    departure = departure_of(leaving)
    await world.move_announced("c1", move, MoveState.SCHEDULED, 16, departure=departure)
    found = await until(lambda: [one for cell, one in world.moves if cell == "c2"])
    assert (found[0].request_id, found[0].arrival, found[0].to_cell) == (move.request_id, departure, None)
    await world.move_announced("c2", move, MoveState.DONE, 20, host="c2-0", **DONE)
    end = await world.moved(move)
    assert (end.state, end.cell, end.departure) == (MoveState.DONE, "c2", None)
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.cell, record.host, record.condition) == ("c2", "c2-0", "active")
    # Further requests go to its new cell.
    await world.delete(built)
    deletes = await until(lambda: list(world.deletes))
    assert [cell for cell, _ in deletes] == ["c2"]


async def test_a_cell_has_a_host_of_another_one_checked_by_way_of_the_schedulers(world: World) -> None:
    built = await one_active(world, config=replace(WARM, moves_across_cells=True))
    move = world.move(built, MoveKind.MIGRATE, host="c2-0")
    leaving = await world.commanded(move)
    assert (leaving.to_cell, [one.host for one in leaving.selections], leaving.kind) == ("c2", ["c2-0"], move.kind)
    (there,) = leaving.selections
    asked = AskedBy(cell="c1", request_id=move.request_id)
    assert leaving.spec is not None
    change = ChangeMachine(
        change=ChangeKind.CHECK,
        spec=leaving.spec,
        attempt=3,
        order=9,
        host_uuid=there.host_uuid,
        service=there.service,
        allocations=there.allocations,
        asked_by=asked,
    )
    await world.buses["c1"].publish(CellAsks(message=CellCheck(cell="c2", asked_by=asked, change=change)))
    (check,) = await until(lambda: [one for cell, one in world.checks if cell == "c2"])
    assert check.change == change
    answer = MachineChanged(
        instance_uuid=built.instance_uuid,
        attempt=3,
        order=9,
        host_uuid=there.host_uuid,
        service=there.service,
        change=ChangeKind.CHECK,
        done=True,
        asked_by=asked,
    )
    await world.buses["c2"].publish(CellAsks(message=CellCheck(cell="c2", asked_by=asked, answer=answer)))
    (answered,) = await until(lambda: [one for cell, one in world.checks if cell == "c1"])
    assert answered.answer == answer


async def test_a_next_cell_that_is_silent_is_commanded_again_and_not_queried(world: World) -> None:
    """Queried it would end the request as lost before it has come there, and the instance would be in no cell."""
    config = replace(WARM, moves_across_cells=True, move_query_s=0.2)
    _, move = await to_be_unshelved_elsewhere(world, config)
    leaving = await world.commanded(move)
    departure = departure_of(leaving)
    await world.move_announced("c1", move, MoveState.SCHEDULED, 16, departure=departure)
    found = await until(lambda: [one for cell, one in world.moves if cell == "c2"][1:])
    assert (found[0].arrival, found[0].request_id) == (departure, move.request_id)
    assert [one for one in world.queries if one[1].request_id == move.request_id] == []


@pytest.mark.parametrize("has_left", [False, True])
async def test_what_is_claimed_in_another_cell_is_given_back_or_the_instance_leaves_for_it(
    world: World, *, has_left: bool
) -> None:
    """Its cell was set back to before the departure, which may be known here first, or come later."""
    built, move = await to_be_unshelved_elsewhere(world, replace(WARM, moves_across_cells=True))
    leaving = await world.commanded(move)
    await world.claim_destination(leaving)
    departure = departure_of(leaving)

    def arrivals() -> list[CellMove]:
        return [one for cell, one in world.moves if cell == "c2" and one.arrival is not None]

    if has_left:
        await world.move_announced("c1", move, MoveState.SCHEDULED, 16, departure=departure)
        await until(arrivals)
    await world.buses["c1"].publish(book_question(move))
    ((cell, answered),) = await until(lambda: world.books)
    assert isinstance(answered.answer, ReleaseResult)
    assert (cell, answered.answer.outcome) == ("c1", "consumer_changed" if has_left else "released")
    if not has_left:
        await world.move_announced("c1", move, MoveState.SCHEDULED, 16, departure=departure)
        ends = {"terminal": True, "condition": Condition.OFFLOADED}
        await world.move_announced("c1", move, MoveState.FAILED, 1_000_017, **ends)
        await world.moved(move)
        record = await world.show(built.instance_uuid)
        assert record is not None
        assert (record.cell, arrivals()) == ("c1", [])


async def test_what_a_cell_asks_of_placement_holds_up_nothing_that_it_announces(world: World) -> None:
    """A batch of announcements waited for each such question by itself, for as long as placement was away."""
    config = replace(WARM, moves_across_cells=True, claim_timeout_s=600.0)
    _, move = await to_be_unshelved_elsewhere(world, config)
    leaving = await world.commanded(move)
    await world.kill("p1")
    await world.buses["c1"].publish(book_question(move))
    await world.move_announced("c1", move, MoveState.CLAIMING, 16)
    event = await until(lambda: [one for one in world.move_events if one.state is MoveState.CLAIMING])
    assert (event[0].request_id, world.books, leaving.to_cell) == (move.request_id, [], "c2")
    await world.kill("s1")  # it would wait for the answer
