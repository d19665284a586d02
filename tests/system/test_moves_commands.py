"""Moves, drains, fences, gangs and deletes through the command line, before a whole running system; drains of
hosts that hold something of an instance that is not active there.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from functools import partial

import asyncpg
import pytest

from berth.bus_client import drains as client_drains
from berth.bus_client.actions import ActionClient
from berth.config.settings import ComputeSettings
from berth.drain_follow import follow
from berth.up.servers import SystemPlan
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionPage, ActionQuery, ActionRequest
from bus.contracts.build import BuildQuery, BuildRequest
from bus.contracts.drains import DrainProgress, DrainQuery, DrainsQuery, DrainStart, DrainState
from bus.contracts.feed import SnapshotPage, SnapshotRequest
from bus.contracts.operations import AdminState, SetAdminState
from compute_sim.config import SimulatedConfig
from compute_sim.faults import Faults
from tests.system import command_line
from tests.system.command_line import NO, TIME, TIMEOUT_S, USAGE, Berth, boot
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


berth = command_line.berth  # the fixture
TARGET = "cell2-c1-00002"


@pytest.fixture
def instance(berth: Berth) -> Iterator[str]:
    """An active instance in cell2; gone afterwards."""
    (build,) = boot(berth, "--host", TARGET)
    yield build["instance_uuid"]
    assert berth("delete", build["instance_uuid"], "--wait", "--yes").status == 0


def shown(berth: Berth, instance: str) -> dict[str, object]:
    found: dict[str, object] = berth("show", instance, "-o", "json").data
    return found


def test_an_instance_is_resized_and_taken_back_migrated_and_kept(berth: Berth, instance: str) -> None:
    done = berth("instance", "resize", instance, "--flavor", "m1.medium", "--wait", "-o", "json")
    assert (done.status, done.data["state"]) == (0, "done"), done.err
    there = shown(berth, instance)
    assert (there["flavor"], there["condition"]) == ("m1.medium", "resized") and there["host"] != TARGET
    # A system in which a move awaits its confirm, for a day perhaps, was BROKEN three times over.
    checked = berth("check", "-o", "json")
    assert (checked.status, checked.data["at_rest"]) == (0, True), checked.out
    assert berth("audit").status == 0
    assert berth("instance", "migrate", instance, "--wait").status == NO  # confirm or revert comes first
    reverted = berth("instance", "revert", instance, "--wait")
    assert reverted.status == 0, reverted.out
    back = shown(berth, instance)
    assert (back["host"], back["flavor"], back["condition"]) == (TARGET, "m1.small", "active")
    migrated = berth("instance", "migrate", instance, "--wait")
    assert (
        migrated.status,
        f"`berth instance confirm {instance}` or `berth instance revert {instance}`" in migrated.out,
    ) == (0, True)
    assert berth("instance", "confirm", instance, "--wait").status == 0
    moved = shown(berth, instance)
    assert moved["host"] != TARGET and moved["condition"] == "active" and "under_way" not in moved
    history = berth("show", instance, "--history").out
    for line in ("resize done", "revert done", "migrate done", "confirm done"):
        assert line in history, history


def test_an_instance_is_stopped_shelved_offloaded_and_unshelved(berth: Berth, instance: str) -> None:
    for command, condition in (
        (["stop"], "stopped"),
        (["rebuild", "--image", "debian", "--yes"], "stopped"),
        (["reboot"], "active"),
        (["reboot", "--soft"], "active"),
        (["stop"], "stopped"),
        (["start"], "active"),
        (["rescue", "--password", "sesame"], "rescued"),
        (["unrescue"], "active"),
        (["rebuild", "--image", "other", "--yes"], "active"),
        (["shelve"], "shelved"),
        (["offload"], "offloaded"),
        (["unshelve"], "active"),
    ):
        done = berth("instance", command[0], instance, *command[1:], "--wait")
        assert done.status == 0, done.out + done.err
        assert shown(berth, instance)["condition"] == condition
        assert (["now", condition] in map(str.split, berth("show", instance).out.splitlines())) == (
            condition != "active"
        )
        (listed,) = (line.split() for line in berth("list").out.splitlines() if line.startswith(instance[:8]))
        assert condition in listed, "it was active in the list, whatever had been done to it"
    actions = berth("action", "list", "--instance", instance, "-o", "json").data
    assert [one["kind"] for one in actions] == [
        *(
            "unshelve",
            "offload",
            "shelve",
            "rebuild",
            "unrescue",
            "rescue",
            "start",
            "stop",
            "reboot",
            "reboot",
            "rebuild",
            "stop",
        ),
    ]
    assert all(one["state"] == "done" for one in actions)


def test_an_offloaded_instance_is_unshelved_in_another_cell_and_comes_back(berth: Berth, instance: str) -> None:
    assert shown(berth, instance)["cell"] == "cell2"
    for host, cell in (("cell1-c1-00001", "cell1"), (TARGET, "cell2")):
        assert berth("instance", "shelve", instance, "--offload", "--wait").status == 0
        done = berth("instance", "unshelve", instance, "--host", host, "--wait", "-o", "json")
        assert (done.status, done.data["state"], done.data["cell"]) == (0, "done", cell), done.out
        there = shown(berth, instance)
        assert (there["host"], there["cell"], there["condition"]) == (host, cell, "active")
        checked = berth("check", "-o", "json")
        assert (checked.status, checked.data["at_rest"]) == (0, True), checked.out
    history = berth("show", instance, "--history").out
    assert history.count("transferred") == 2, history
    assert berth("audit").status == 0


def test_an_instance_moves_to_another_cell_and_back_and_is_resized_there(berth: Berth, instance: str) -> None:
    """Each move is over when the instance runs: nothing is kept where it was, so there is nothing to go back to."""
    elsewhere = "cell1-c1-00001"
    for command, host, cell, flavor in (
        (["migrate"], elsewhere, "cell1", "m1.small"),
        (["migrate"], TARGET, "cell2", "m1.small"),
        (["resize", "--flavor", "m1.medium"], elsewhere, "cell1", "m1.medium"),
    ):
        done = berth("instance", command[0], instance, *command[1:], "--host", host, "--wait", "-o", "json")
        assert (done.status, done.data["state"], done.data["cell"]) == (0, "done", cell), done.out
        there = shown(berth, instance)
        assert (there["host"], there["cell"], there["condition"]) == (host, cell, "active")
        assert there["flavor"] == flavor
        refused = berth("instance", "revert", instance, "--wait", "-o", "json")
        assert (refused.status, refused.data["code"]) == (NO, "action.none")
        checked = berth("check", "-o", "json")
        assert (checked.status, checked.data["at_rest"]) == (0, True), checked.out
    assert berth("show", instance, "--history").out.count("transferred") == 3
    assert berth("audit").status == 0


def test_mistakes_are_sentences_with_codes(berth: Berth, instance: str) -> None:
    for arguments, status, code in (
        (["instance", "resize", instance, "--flavor", "nope"], NO, "flavor.unknown"),
        (["instance", "resize", instance], USAGE, ""),
        (["instance", "migrate", instance, "--live", "--host", "nowhere", "--wait"], NO, ""),
        (["instance", "evacuate", instance], NO, "host.not_fenced"),
        (["instance", "stop", str(uuid.uuid4())], NO, "instance.unknown"),
        (["instance", "stop", "x" * 256], USAGE, ""),
        (["host", "drain", "nowhere"], NO, "host.unknown"),
    ):
        answer = berth(*arguments)
        assert answer.status == status and code in answer.err, (arguments, answer)
    refused = berth("instance", "confirm", instance, "--wait", "-o", "json")
    assert (refused.status, refused.data["code"]) == (NO, "action.none")
    unplaced = berth("instance", "resize", instance, "--flavor", "gpu.small", "--wait", "-o", "json")
    assert (unplaced.status, unplaced.data["code"]) == (NO, "no_valid_host")
    assert f"request {unplaced.data['request_id']}" in (told := berth("show", instance).out) and "rejected" in told
    assert shown(berth, instance)["state"] == "active"


def test_a_request_that_is_repeated_by_its_id_happens_once(berth: Berth, instance: str) -> None:
    own = str(uuid.uuid4())
    assert berth("instance", "stop", instance, "--id", own, "--wait").status == 0
    assert berth("instance", "stop", instance, "--id", own, "--wait").status == 0
    assert len(berth("action", "list", "--instance", instance, "-o", "json").data) == 1
    assert berth("instance", "start", instance, "--id", own).status == NO


def test_a_host_is_drained_by_the_plan(berth: Berth) -> None:
    host = "cell2-c1-00003"
    mine = {boot(berth, "--host", host)[0]["instance_uuid"] for _ in range(3)}
    plan = berth("host", "drain", host, "--plan", "-o", "json")
    assert plan.status == 0 and mine <= {one["instance_uuid"] for one in plan.data["moves"]}
    try:
        drained = berth("host", "drain", host, "--at-once", "2", "-o", "json", "--reason", "fan")
        assert drained.status == 0, drained.err
        assert mine <= set(drained.data["moved"]) and drained.data["failed"] == []
        assert berth("host", "drain", host, "--plan", "-o", "json").data.get("moves", []) == []
        (there,) = (one for one in berth("host", "list", "-o", "json").data if one["name"] == host)
        assert there["admin"]["state"] == "disabled" and all(not used for used, _ in there["resources"].values())
        assert berth("check").status == 0
    finally:
        berth("host", "enable", host)
        berth("delete", *mine, "--wait", "--yes")


def test_a_service_is_drained(berth: Berth) -> None:
    """Its instances go to the hosts of the cell's other service; its hosts stay disabled."""
    mine = {boot(berth, "--host", f"cell2-c1-0000{at}")[0]["instance_uuid"]: f"cell2-c1-0000{at}" for at in (1, 2, 3)}
    drained = berth("service", "drain", "cell2-c1", "-o", "json", "--reason", "rack", "--at-once", "2")
    try:
        assert (drained.status, drained.data["target"], drained.data["code"]) == (0, "service", "drain.done"), drained
        assert mine.keys() <= set(drained.data["moved"])
        hosts = {shown(berth, one)["host"] for one in mine}
        assert all(str(host).startswith("cell2-c2-") for host in hosts), hosts
        listed = berth("drain", "list", "-o", "json").data[0]
        assert (listed["id"], listed["state"]) == (drained.data["id"], "ended")
        assert berth("drain", "pause", drained.data["id"]).status == NO
        there = berth("host", "list", "--cell", "cell2", "-o", "json").data
        states = {one["admin"]["state"] for one in there if one["service"] == "cell2-c1"}
        assert states == {"disabled"}
        assert "drain" in berth("event", "list", "--kind", "drain").out and berth("check").status == 0
    finally:
        for one in berth("host", "list", "--cell", "cell2", "-o", "json").data:
            if one["service"] == "cell2-c1":
                berth("host", "enable", one["name"])
        berth("delete", *mine, "--wait", "--yes")


def test_a_cell_is_drained_into_another_one(berth: Berth) -> None:
    """Every instance of it is built there from its image, and runs; the stopped one stays stopped."""
    mine = {boot(berth, "--host", f"cell2-c{at}-00001")[0]["instance_uuid"] for at in (1, 2)}
    stopped = min(mine)
    assert berth("instance", "stop", stopped, "--wait").status == 0
    plan = berth("cell", "drain", "cell2", "--plan", "-o", "json")
    assert plan.status == 0 and mine <= {one["instance_uuid"] for one in plan.data["moves"]}
    assert all(host.startswith("cell1-") for one in plan.data["moves"] for host in one["hosts"])
    drained = berth("cell", "drain", "cell2", "-o", "json", "--reason", "rack")
    try:
        assert (drained.status, drained.data["target"], drained.data["code"]) == (0, "cell", "drain.done"), drained
        assert mine <= set(drained.data["moved"])
        found = {one: shown(berth, one) for one in mine}
        assert all(str(one["host"]).startswith("cell1-") for one in found.values()), found
        assert {uuid: one["condition"] for uuid, one in found.items()} == {
            uuid: "stopped" if uuid == stopped else "active" for uuid in mine
        }
        there = berth("host", "list", "--cell", "cell2", "-o", "json").data
        assert all(
            one["admin"]["state"] == "disabled" and not any(u for u, _ in one["resources"].values()) for one in there
        )
        assert berth("cell", "drain", "cell2", "--plan", "-o", "json").data.get("moves", []) == []
        assert berth("check").status == 0
    finally:
        for one in berth("host", "list", "--cell", "cell2", "-o", "json").data:
            berth("host", "enable", one["name"])
        berth("delete", *mine, "--wait", "--yes")


def test_no_wait_answers_at_once_and_time_runs_out(berth: Berth, instance: str) -> None:
    answer = berth("instance", "stop", instance, "-o", "json")
    assert (answer.status, answer.data[0]["state"]) == (0, "accepted")
    late = berth("instance", "start", instance, "--wait", "--timeout", "0.1")
    assert late.status in (0, NO, TIME)  # done, refused as the stop is under way, or late


def test_an_affinity_group_leaves_a_dead_host_together(berth: Berth) -> None:
    group = ("--project", "near", "--group", "g")
    assert berth("group", "create", "near/g", "--policy", "affinity").status == 0
    built = [boot(berth, *group)[0]["instance_uuid"] for _ in range(3)]
    (dead,) = {shown(berth, one)["host"] for one in built}
    assert berth("host", "fence", str(dead), "--reason", "burnt", "--force", "--yes").status == 0
    try:
        for one in built:
            done = berth("instance", "evacuate", one, "--force", "--wait")
            assert done.status == 0, done.out + done.err
        (there,) = {shown(berth, one)["host"] for one in built}
        assert there != dead
    finally:
        enabled = berth("host", "enable", str(dead))
        assert enabled.status == 0, enabled.err
    for one in built:
        assert berth("delete", one, "--wait", "--yes").status == 0


def test_machines_start_together_or_not_at_all(berth: Berth) -> None:
    together = berth("boot", "--flavor", "m1.tiny", "--count", "3", "--gang", "--wait", "-o", "json")
    assert (together.status, {one["state"] for one in together.data}) == (0, {"active"}), together.out
    (gang,) = {shown(berth, one["instance_uuid"])["gang"] for one in together.data}
    listed = berth("list", "--gang", str(gang), "-o", "json").data
    assert {one["instance_uuid"] for one in listed} == {one["instance_uuid"] for one in together.data}
    for one in together.data:
        assert berth("delete", one["instance_uuid"], "--wait", "--yes").status == 0
    # There are nodes for some of them, so all fail without a limit below their number, and only the rest with one.
    none = berth("boot", "--flavor", "bm.gold", "--count", "40", "--gang", "--wait", "-o", "json")
    assert (none.status, len(none.data), {one["state"] for one in none.data}) == (NO, 40, {"failed"})
    some = berth("boot", "--flavor", "bm.gold", "--count", "40", "--min-count", "1", "--wait", "-o", "json")
    started = [one["instance_uuid"] for one in some.data if one["state"] == "active"]
    assert some.status == NO and 0 < len(started) < 40
    assert {one["code"] for one in some.data if one["state"] == "failed"} <= {"no_valid_host", "gang.left_out"}
    for uuid_ in started:
        assert berth("delete", uuid_, "--wait", "--yes").status == 0
    assert berth("check").status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--count", "101", "--gang"),
        ("--count", "2", "--min-count", "3"),
        ("--count", "2", "--uuid", str(uuid.uuid4())),
    ],
)
def test_what_no_gang_can_be_is_a_mistake_of_use(berth: Berth, arguments: tuple[str, ...]) -> None:
    assert berth("boot", "--flavor", "m1.tiny", *arguments).status == USAGE


def test_a_delete_ends_and_ends_again(berth: Berth) -> None:
    (build,) = boot(berth, "--project", "gone")
    found = build["instance_uuid"]
    assert berth("delete", found.upper(), "--wait", "--yes").status == 0
    assert berth("show", found, "-o", "json").data["state"] == "deleted"
    again = berth("delete", found, "--wait", "-o", "json", "--timeout", "20", "--yes")
    assert (again.status, again.data[0]["state"]) == (0, "deleted")
    assert berth("list", "--project", "gone", "--state", "active", "-o", "json").data == []


def test_an_operator_deletes_in_its_cell_what_no_client_can_delete(berth: Berth) -> None:
    """A restore may leave an instance whose request has ended: a second delete of that changes nothing."""
    (build,) = boot(berth, "--project", "left")
    found, cell = build["instance_uuid"], build["cell"]
    refused = berth("delete", found, "--cell", cell, "--yes")
    assert (refused.status, "delete it without --cell" in refused.err) == (NO, True)
    (runtime,) = berth.directory.rglob("runtime.json")
    end = "UPDATE build_requests SET state = 'deleted' WHERE instance_uuid = $1 RETURNING state"
    left = "SELECT state FROM instances WHERE uuid = $1"

    async def read(schema: str, statement: str) -> str:
        connection = await asyncpg.connect(
            json.loads(runtime.read_bytes())["database_url"].replace("+asyncpg", ""),
            server_settings={"search_path": schema},
        )
        try:
            return str(await connection.fetchval(statement, uuid.UUID(found)))
        finally:
            await connection.close()

    assert asyncio.run(read("scheduler", end)) == "deleted"
    (finding,) = [json.loads(line) for line in berth("audit", "-o", "json").out.splitlines()]
    assert (finding["kind"], finding["repair"]) == ("unrequested", f"berth delete {found} --cell {cell}")
    assert berth("delete", found, "--cell", cell, "--yes").status == 0
    until = time.monotonic() + TIMEOUT_S
    while asyncio.run(read(f"cell_{cell}", left)) != "deleted":
        assert time.monotonic() < until, "its cell has it"
        time.sleep(0.1)
    assert berth("audit").status == 0


# --- a drain of a host that holds something of an instance that is not active there


POLL_S = 0.05
SLOW = Faults(
    delay_min_s=3.0, delay_max_s=3.0, change_min_s=0.8, change_max_s=0.8
)  # of builds, and of each step of a move
DRAINS_PLAN = SystemPlan(
    cells=("cell1",),
    placements=1,
    compute=ComputeSettings(simulated=SimulatedConfig(hosts=4, gpu_share=0.0, faults=SLOW)),
    durable=False,
)


async def host_of(whole: Rig, instance: str) -> str:
    """The host on record of an instance, or of its build in progress."""
    while True:
        page = await whole.client.query(BuildQuery(instance_uuid=instance), timeout_s=TIMEOUT_S)
        if page.builds and page.builds[0].host is not None:
            return page.builds[0].host
        await whole.site.clock.sleep(POLL_S)


async def requested(whole: Rig) -> str:
    """A build that is requested; it takes a while."""
    instance = new_uuid(whole.rng)
    await whole.client.boot([BuildRequest(instance_uuid=instance, project_id="p", flavor="m1.small")])
    return instance


async def drains_moved(actions: ActionClient, whole: Rig, instance: str, kind: ActionKind, *, wait: bool) -> str:
    """A request about the instance; its id."""
    request = new_uuid(whole.rng)
    one = ActionRequest(request_id=request, instance_uuid=instance, project_id="p", kind=kind)
    await actions.ask(one)
    if wait:
        await actions.wait(TIMEOUT_S)
        assert actions.ended[request].state == "done", actions.ended[request]
    return request


async def destination(whole: Rig, request: str) -> str:
    """The host that a request under way names."""
    while True:
        page = await whole.client.bus.request(ActionQuery(request_id=request), ActionPage, timeout_s=TIMEOUT_S)
        if page.actions and page.actions[0].host is not None:
            return page.actions[0].host
        await whole.site.clock.sleep(POLL_S)


async def drained(whole: Rig, host: str, *, force: bool = False) -> DrainProgress:
    """The end of a drain of this host, or how it is when nothing left can move."""
    start = DrainStart(drain=new_uuid(whole.rng), name=host, by="ann", force=force)
    await client_drains.start(whole.client.bus, start)
    return await followed(whole, start.drain)


async def followed(whole: Rig, drain: str) -> DrainProgress:
    return await follow(
        partial(client_drains.one, whole.client.bus, drain), clock=whole.site.clock, timeout_s=TIMEOUT_S
    )


async def used(whole: Rig, host: str) -> dict[str, int]:
    """Usage of the host in placement."""
    page = await whole.client.bus.request(SnapshotRequest(limit=5000), SnapshotPage, timeout_s=TIMEOUT_S)
    (there,) = (one for one in page.providers if one.name == host)
    return {name: amount for name, amount in there.used.items() if amount}


async def test_a_drain_is_done_when_its_host_holds_nothing() -> None:
    async with rig(DRAINS_PLAN) as whole:
        actions = ActionClient(whole.client.bus, clock=whole.site.clock, process="drains")
        await actions.open()
        # A build is in progress on the host.
        instance = await requested(whole)
        host = await host_of(whole, instance)
        ended = await drained(whole, host)
        assert (ended.code, ended.moved, await used(whole, host)) == ("drain.done", (instance,), {})
        enabled = SetAdminState(host=host, state=AdminState.ENABLED, by="ann")
        await whole.client.set_admin_state(enabled, timeout_s=TIMEOUT_S)
        # A move to the host is under way.
        request = await drains_moved(actions, whole, instance, ActionKind.LIVE_MIGRATE, wait=False)
        host = await destination(whole, request)
        # Forced: as soon as the instance is on the host, and until its request has ended, it is `instance.busy`. A host
        # that is disabled before its claim is not claimed any more: then the instance goes to an alternate.
        ended = await drained(whole, host, force=True)
        assert (ended.code, await used(whole, host)) == ("drain.done", {})
        assert await actions.wait(TIMEOUT_S) and await host_of(whole, instance) != host
        assert await used(whole, host) == {}
        # The host keeps the source of a move that awaits its confirm.
        source = await host_of(whole, instance)
        await drains_moved(actions, whole, instance, ActionKind.MIGRATE, wait=True)
        plan = await client_drains.plan(whole.client.bus, DrainQuery(host=source))
        assert [(one.instance_uuid, one.code) for one in plan.moves] == [(instance, "instance.unconfirmed")]
        going = await drained(whole, source, force=True)
        assert (going.state, [one.code for one in going.failed]) == (DrainState.RUNNING, ["instance.unconfirmed"])
        assert await used(whole, source)
        await drains_moved(actions, whole, instance, ActionKind.CONFIRM, wait=True)
        ended = await followed(whole, going.id)
        assert (ended.code, await used(whole, source)) == ("drain.done", {})
        await actions.close()
        await whole.assert_invariants()


KILLED_PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=2,
    placements=1,
    compute=ComputeSettings(simulated=SimulatedConfig(hosts=4, gpu_share=0.0)),
    durable=False,
)
AT_ONCE = 2


async def test_a_drain_goes_on_whichever_scheduler_is_killed() -> None:
    """Each is killed in the middle (SIGKILL), one after the other, again and again: no instance is moved twice or lost,
    and never are more under way than the drain allows.
    """
    async with rig(KILLED_PLAN, seed=7) as whole:
        (source, *_) = sorted(one.name for one in (await whole.client.hosts(limit=100, timeout_s=TIMEOUT_S)).hosts)
        builds = [
            BuildRequest(instance_uuid=new_uuid(whole.rng), project_id="p", flavor="m1.tiny", host=source)
            for _ in range(10)
        ]
        watches = await whole.client.boot(builds)
        assert await whole.client.wait(TIMEOUT_S) and {watch.state for watch in watches} == {"active"}
        drain = DrainStart(drain=new_uuid(whole.rng), name=source, by="ann", at_once=AT_ONCE)
        await client_drains.start(whole.client.bus, drain)
        killed = 0
        while True:
            page = await whole.client.bus.request(ActionQuery(limit=100), ActionPage, timeout_s=TIMEOUT_S)
            assert sum(not one.terminal for one in page.actions) <= AT_ONCE
            (seen,) = await client_drains.drains(whole.client.bus, DrainsQuery(drain=drain.drain))
            if seen.state is DrainState.ENDED:
                break
            if len(page.actions) > killed:  # another move has begun since
                name, killed = f"scheduler{1 + killed % 2}", killed + 1
                await asyncio.to_thread(whole.processes.kill, name)
                await asyncio.to_thread(whole.processes.restart, name)
            await whole.site.clock.sleep(POLL_S)
        assert killed >= 3
        assert (seen.code, sorted(seen.moved)) == ("drain.done", sorted(one.instance_uuid for one in builds))
        done = [one.instance_uuid for one in page.actions if one.state == "done"]
        assert len(done) == len(set(done)) == len(builds)
        assert await used(whole, source) == {}
        await whole.assert_invariants()
