"""The command line as a user has it: one `berth up`, every command a process of its own, every mistake a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from berth.config.ports import free_port
from berth.up.worker_processes import NO_TLS, WorkerProcesses
from bus.persistence.database import Database
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety
from lab.load.record import STAGES, decode
from tests.kit.waiting import wait_until
from tests.system import command_line
from tests.system.command_line import (
    NO,
    STOP_TIMEOUT_S,
    TIME,
    TIMEOUT_S,
    UNKNOWN,
    UNREACHABLE,
    USAGE,
    Berth,
    boot,
    parked,
    publish,
    timeline_of,
)

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.timeout(600)]

berth = command_line.berth  # the fixture


def test_fifty_machines_with_one_command(berth: Berth) -> None:
    lines = berth.first.out.splitlines()
    assert (berth.first.status, len(lines)) == (0, 50)
    assert all(str(uuid.UUID(line.split()[0])) == line.split()[0] and " active on " in line for line in lines)


def test_a_build_has_its_whole_timeline(berth: Berth) -> None:
    """Request, candidates, choice, claim, each attempt, end; the same for people and for programs."""
    (build,) = boot(berth, "--host", "cell2-c1-00001", "--name", "one", "--project", "timeline")
    shown = berth("show", build["instance_uuid"], "--history", "-o", "json").data
    assert (shown["state"], shown["host"], shown["name"]) == ("active", "cell2-c1-00001", "one")
    whole = ["requested", "chosen", "claimed", "dispatched", "building", "active"]
    timeline = timeline_of(berth, build["instance_uuid"], whole)
    assert dict(timeline)["chosen"].startswith("cell2-c1-00001 of 1 candidates")
    output = berth("show", build["instance_uuid"], "--history").out
    assert all(what in output and detail in output for what, detail in timeline)
    stages = re.findall(r"(\w+) [0-9.]+ ms", output)
    assert stages == ["queued", "decided", "claimed", "dispatched", "built", "announced"]


def test_metrics_of_a_host(berth: Berth) -> None:
    """A measurement that an operator's program publishes about a host is there for weighers, with its time and its
    source.
    """
    given = ["--set", "power.watts=210.5", "--set", "rack.inlet_celsius=-3", "--source", "rack7"]
    assert berth("host", "metrics", "cell1-c1-00001", *given).status == 0
    (host,) = berth("host", "metrics", "cell1-c1-00001", "-o", "json").data
    assert {one["name"]: (one["value"], one["source"], one["fresh"]) for one in host["metrics"]} == {
        "power.watts": (210.5, "rack7", True),
        "rack.inlet_celsius": (-3.0, "rack7", True),
    }
    shown = berth("host", "metrics", "cell1-c1-00001").out
    assert "rack.inlet_celsius" in shown and "rack7" in shown
    assert berth("host", "metrics", "cell1-c1-00002", "-o", "json").data[0]["metrics"] == []
    assert berth("host", "metrics", "nowhere").status == NO
    for wrong in ("watts", "watts=hot", "Watts=1", "watts=nan", "watts=1e300"):
        assert berth("host", "metrics", "cell1-c1-00001", "--set", wrong).status == USAGE


def test_volumes_of_a_file_are_requested_and_shown_nowhere(berth: Berth) -> None:
    """Where bare metal takes none, the driver answers so: they have reached it."""
    file = berth.directory / "volumes.json"
    file.write_text('[{"volume_id": "root", "properties": {"auth_password": "s3cret"}}]')
    ask = ("boot", "--flavor", "bm.gold", "--volumes", str(file))
    done = berth(*ask, "--wait", "-o", "json")
    assert (done.status, done.data[0]["code"]) == (NO, "volume.none"), done
    assert "s3cret" not in berth("show", done.data[0]["instance_uuid"], "--history", "-o", "json").out
    for wrong in (
        '{"volume_id": "s3cret"}',
        '[{"volume": "s3cret"}]',
        '["s3cret',
        '[{"volume_id": "", "properties": {"auth_password": "s3cret"}}]',
    ):
        file.write_text(wrong)
        refused = berth(*ask)
        assert (refused.status, "--volumes" in refused.err, "s3cret" in refused.err) == (USAGE, True, False), refused


def test_a_build_that_no_host_takes_is_explained(berth: Berth) -> None:
    done = berth("boot", "--flavor", "bm.gold", "--count", "3", "--wait", "-o", "json")
    assert done.status == NO
    failed = next(one for one in done.data if one["state"] == "failed")
    assert failed["code"] == "no_valid_host" and "CUSTOM_BAREMETAL_GOLD" in failed["reason"]
    record = berth("show", failed["instance_uuid"], "-o", "json").data
    assert record["funnel"][0]["step"] == "providers" and record["funnel"][-1]["remaining"] == 0
    result = berth("boot", "--flavor", "bm.gold", "--count", "2", "--wait").out
    assert result.count("  CUSTOM_BAREMETAL_GOLD ") == 1, "the same explanation is given once"


def test_hosts_with_what_is_used_of_them(berth: Berth) -> None:
    said = berth("host", "list", "--limit", "1", "--cell", "cell1").err
    assert said == "1, next: berth host list --cell cell1 --limit 10\n", "a list ended and did not say so"
    hosts = {host["name"]: host for host in berth("host", "list", "-o", "json").data}
    assert hosts["cell1-c1-00001"]["up"] and hosts["cell1-c1-00001"]["cell"] == "cell1"
    used, capacity = hosts["cell1-c1-00001"]["resources"]["VCPU"]
    assert 0 <= used <= capacity


def test_a_disabled_host_takes_nothing_until_it_is_enabled(berth: Berth) -> None:
    name = "cell2-c1-00001"
    refused = boot(berth, "--host", name)[0]["host"]
    assert refused == name
    try:
        result = berth("host", "disable", name, "--reason", "fan\n2")
        assert (result.status, result.out) == (0, f"{name}: disabled, by local\n")
        (host,) = (one for one in berth("host", "list", "-o", "json").data if one["name"] == name)
        assert (host["enabled"], host["admin"]["by"], host["admin"]["reason"]) == (False, "local", "fan\n2")
        (row,) = (line for line in berth("host", "list").out.splitlines() if line.startswith(name))
        assert "disabled" in row and row.endswith("local: fan\\n2")
        failed = berth("boot", "--flavor", "m1.tiny", "--host", name, "--wait", "-o", "json")
        assert (failed.status, failed.data[0]["code"]) == (NO, "no_valid_host")
    finally:
        assert berth("host", "enable", name).status == 0
    boot(berth, "--host", name)
    unknown = berth("host", "maintenance", "nowhere", "--reason", "x", "-o", "json")
    assert (unknown.status, unknown.data["refused"][0]["code"]) == (NO, "host.unknown")
    assert berth("host", "disable", name).status == USAGE  # without a reason


def test_a_host_that_its_service_reports_is_not_forgotten(berth: Berth) -> None:
    name, unknown = "cell2-c1-00001", "f0000000-0000-4000-8000-00000000000f"
    refused = berth("host", "delete", name, "nowhere", "--reason", "scrapped", "-o", "json", "--yes")
    assert refused.status == NO and refused.data["hosts"] == []
    assert [one["code"] for one in refused.data["refused"]] == ["host.service_up", "host.unknown"]
    assert "host.service_up" in berth("host", "delete", name, "--reason", "scrapped", "--yes").err
    nothing = berth("host", "delete", unknown, "--reason", "scrapped", "--yes")
    assert (nothing.status, nothing.out) == (0, f"{unknown}: nothing of it was on record\n")
    assert berth("host", "delete", name).status == USAGE  # without a reason
    assert name in berth("host", "list").out


def test_compute_services_are_listed(berth: Berth) -> None:
    services = berth("service", "list", "-o", "json")
    assert services.status == 0 and {one["cell"] for one in services.data} == {"cell1", "cell2"}
    assert sum(one["hosts"] for one in services.data) == len(berth("host", "list", "-o", "json").data)
    assert berth("service", "list", "--down").out.splitlines()[1:] == []


def test_every_worker_is_listed_with_what_it_is_doing(berth: Berth) -> None:
    roles = {"placement", "scheduler", "conductor", "compute", "ironic-sync"}

    def all_listed() -> Any:
        result = berth("worker", "list", "-o", "json")
        are_ready = not any(one.get("silent") or one["heartbeat"].get("not_ready") for one in result.data)
        return result if are_ready and {one["heartbeat"]["role"] for one in result.data} >= roles else None

    result = wait_until(all_listed)
    heartbeats = [(one["heartbeat"]["role"], one["bus"]) for one in result.data]
    assert roles == {role for role, _ in heartbeats}
    assert {bus for role, bus in heartbeats if role == "conductor"} == {"cell1", "cell2"}
    for one in result.data:
        beat = one["heartbeat"]
        assert beat["phase"] == "ready" and beat["pid"] > 1 and beat["version"] and one["last_seen_s"] < 60
    queues = {queue for one in result.data for queue in one["heartbeat"].get("in_flight", {})}
    assert {"scheduler.requests", "conductor.requests", "placement.requests"} <= queues
    only = berth("worker", "list", "--role", "compute").out.splitlines()
    assert len(only) > 1 and all(line.split()[1] == "compute" for line in only[1:])


def test_the_same_request_twice_is_one_build_and_another_under_its_uuid_is_not_taken(berth: Berth) -> None:
    instance = str(uuid.uuid4())
    ask = ("--uuid", instance, "--project", "twice")
    first, second = boot(berth, *ask), boot(berth, *ask, "--timeout", "20")
    assert first[0]["host"] and second[0]["state"] == "active"
    clash = berth("boot", "--flavor", "m1.tiny", *ask, "--wait", "-o", "json")
    assert (clash.status, clash.data[0]["code"]) == (NO, "request.duplicate")
    assert berth("show", instance, "-o", "json").data["flavor"] == "m1.small"
    assert len(berth("list", "--project", "twice", "-o", "json").data) == 1


def test_dead_letters_are_listed_shown_replayed_and_purged(berth: Berth) -> None:
    """A request that is no JSON names no project that could be answered, so it is parked."""
    instance = str(uuid.uuid4())
    asyncio.run(publish(berth, f"not JSON: {instance}\n\u202e".encode()))
    letters = ("scheduler.requests", "-o", "json")
    mine = parked(berth, instance)
    assert [one["code"] for one in mine] == ["message.malformed"]
    shown = berth("dead-letter", "show", "scheduler.requests", mine[0]["id"], "-o", "json").data
    assert (shown["queue"], shown["body"]) == ("scheduler.requests", f"not JSON: {instance}\n\u202e")
    assert instance in berth("dead-letter", "show", "scheduler.requests", mine[0]["id"]).out
    counts = berth("dead-letter", "list", "-o", "json").data
    assert next(one for one in counts if one["queue"] == "scheduler.requests")["dead"] >= 1
    assert berth("dead-letter", "replay", *letters, mine[0]["id"]).data["replayed"] == [mine[0]["id"]]
    assert len(parked(berth, instance)) == 1, "it is no better now"
    assert berth("dead-letter", "delete", "scheduler.requests", given="y\n").status == USAGE
    assert berth("dead-letter", "delete", *letters, "--yes").data["purged"] >= 1
    assert berth("dead-letter", "list", *letters).data == []


def test_a_load_is_reported_and_judged(berth: Berth) -> None:
    report = berth.load("--boots", "60", "--rate", "200", "--churn", "0.5", "--seed", "4", "--json", "load.json")
    assert report.status == 0, report.err
    record = decode((berth.directory / "load.json").read_bytes())
    assert record.totals.outcomes == {"active": 60}
    assert record.totals.deletes == record.totals.delete_outcomes["deleted"] == len(record.deletes) > 10
    assert set(record.boots.stages) == set(STAGES) and len(record.utilisation.hosts) >= 16
    assert "scheduler.requests" in record.samples.depths
    closed = berth.load("--boots", "20", "--concurrency", "5", "--mix", "small=3,gold=1", "--json", "-")
    assert closed.data["totals"]["boots"] == 20 and set(closed.data["boots"]["kinds"]) == {"vm", "metal"}
    ramp = berth.load("--ramp", "10..40/1")
    assert "25 boots, 25 accepted: 25 active" in ramp.out and "knee" in ramp.out


def test_an_interrupted_load_ends_with_its_summary(berth: Berth) -> None:
    arguments = ("--boots", "100000", "--rate", "20", "--json", "cut.json")
    with berth.start("lab.load.command", *arguments, stderr=subprocess.PIPE) as load:
        assert load.stderr is not None
        load.stderr.readline()  # the first line of progress: it is under way
        load.send_signal(signal.SIGINT)
        out, _ = load.communicate(timeout=STOP_TIMEOUT_S)
    assert load.returncode == 130 and "interrupted" in out and " active" in out
    record = decode((berth.directory / "cut.json").read_bytes())
    assert record.totals.interrupted and "lost" not in record.totals.outcomes and record.totals.boots > 20


def test_invariants_hold_after_the_loads(berth: Berth) -> None:
    check = berth("check", "-o", "json")
    assert check.status == 0, check.out
    assert check.data["at_rest"] and len(check.data["invariants"]) >= 7
    assert berth("check").out.count("holds") == len(check.data["invariants"])


def test_check_reports_an_open_breaker_and_of_machines_in_quarantine(berth: Berth) -> None:
    machine = UnknownMachine(UNKNOWN, 3, UNKNOWN, UnknownMachineKind.QUARANTINED, "no record")
    (runtime,) = berth.directory.rglob("runtime.json")
    database = Database(json.loads(runtime.read_bytes())["database_url"], "cell_cell1")

    async def put_on_record() -> None:
        await database.open()
        safety = Safety(PostgresKeyed(database))
        await safety.trip(Breaker(service="s", tripped_at=0.0, lost=6))
        await safety.record("s", [machine], 0.0)
        await database.close()

    asyncio.run(put_on_record())
    check = berth("check", "-o", "json")
    assert check.status == 1
    broken = {one["name"]: one["examples"] for one in check.data["invariants"] if not one["holds"]}
    assert set(broken) == {"breakers_closed", "quarantine_decided"}
    assert broken["breakers_closed"][0].startswith(
        "cell1: the breaker of s is open since 1970-01-01 00:00:00 UTC (6 lost"
    )
    assert "no record: see `berth quarantine list`" in broken["quarantine_decided"][0]
    output = berth("check")
    assert output.status == 1 and "BROKEN no breaker is open" in output.out and "`berth breaker list`" in output.out
    assert berth("breaker", "reset", "s", "--cell", "cell1", "--yes").status == 0
    assert berth("quarantine", "protect", UNKNOWN, "--cell", "cell1").status == 0
    assert berth("check").status == 0


def test_settings_are_shown_without_their_secrets(berth: Berth) -> None:
    secrets = {
        "BERTH_DATABASE__URL": "postgresql://me:hunter2@db/berth",
        "BERTH_CELLS__CELL1__URL": "amqp://cell:hunter2@mq/cell1",
        "BERTH_IRONIC_SYNC__TOKEN": "hunter2",
        "BERTH_IRONIC_SYNC__PASSWORD": "hunter2",
        "BERTH_COMPUTE__IRONIC__TOKEN": "hunter2",
    }
    as_json = berth("config", "-o", "json", settings=secrets)
    as_text = berth("config", settings=secrets)
    assert "hunter2" not in as_json.out + as_text.out
    assert as_json.data["database"]["url"] == "postgresql://me:***@db/berth"
    # The output is a settings file.
    (berth.directory / "again.toml").write_text(berth("config").out)
    assert berth("--config", "again.toml", "config", "-o", "json").data == berth("config", "-o", "json").data


WRONG: list[tuple[int, str, tuple[str, ...], dict[str, str]]] = [
    (NO, "(instance.unknown)", ("show", "nonsense"), {}),
    (USAGE, "length <= 255", ("show", "x" * 256), {}),
    (USAGE, "give --project, --state or --name", ("delete", "--yes"), {}),
    (USAGE, "name instances, or choose them", ("delete", UNKNOWN, "--state", "failed"), {}),
    (NO, "(instance.unknown)", ("delete", "nonsense"), {}),
    (USAGE, "leave --wait and -o away", ("delete", UNKNOWN, "--cell", "cell1", "--wait"), {}),
    (USAGE, "leave --wait and -o away", ("delete", UNKNOWN, "--cell", "cell1", "-o", "json"), {}),
    (USAGE, "not a UUID", ("boot", "--flavor", "m1.small", "--uuid", "1"), {}),
    (USAGE, "not a UUID", ("boot", "--flavor", "m1.small", "--network", "private"), {}),
    (USAGE, "--availability-zone", ("boot", "--flavor", "m1.small", "--availability-zone", "z "), {}),
    (USAGE, "--flavor", ("boot",), {}),
    (USAGE, "--project", ("boot", "--flavor", "m1.small", "--project", "a b"), {}),
    (USAGE, "leave --count away", ("boot", "--flavor", "x", "--count", "2", "--uuid", UNKNOWN), {}),
    (USAGE, "cannot read", ("boot", "--flavor", "x", "--volumes", "nowhere.json"), {}),
    (USAGE, "leave --count away", ("boot", "--flavor", "x", "--count", "2", "--volumes", "nowhere.json"), {}),
    (USAGE, "accepted", ("list", "--state", "floating"), {}),
    (USAGE, "No such command", ("frobnicate",), {}),
    (NO, "flavor.unknown", ("boot", "--flavor", "nope", "--wait", "-o", "json"), {}),
    (NO, "there is no instance", ("show", UNKNOWN), {}),
    (NO, "there is no instance", ("delete", UNKNOWN), {}),
    (NO, "no dead letter", ("dead-letter", "show", "scheduler.requests", "x"), {}),
    (NO, "(queue.unknown)", ("dead-letter", "list", "nope"), {}),
    (NO, "(bus.unknown)", ("dead-letter", "list", "scheduler.builds", "--bus", "mars"), {}),
    (USAGE, "(cell.unknown)", ("dead-letter", "list", "--bus", "mars"), {}),
    (USAGE, "name the dead letters", ("dead-letter", "replay", "scheduler.requests"), {}),
    (USAGE, "all dead letters", ("dead-letter", "replay", "scheduler.requests", "--all", "--old"), {}),
    (USAGE, "no settings file", ("--config", "missing.toml", "config"), {}),
    (USAGE, "did you mean bus", ("config",), {"BERTH_BUSS__URL": "x"}),
    (USAGE, "Expected `int`", ("config",), {"BERTH_UP__NODES": "many"}),
    (USAGE, "at least one cell is needed under [cells]", ("config",), {"BERTH_CELLS": "{}"}),
    (USAGE, "'NoSuchFilter' is not available", ("config",), {"BERTH_SCHEDULER__ENABLED_FILTERS": '["NoSuchFilter"]'}),
    (
        USAGE,
        "flavor bad: resources:VCPU: 'many' is no amount (flavor.invalid)",
        ("config",),
        {"BERTH_SCHEDULER__FLAVORS": '{"bad": {"extra_specs": {"resources:VCPU": "many"}}}'},
    ),
    (USAGE, "amqp://user:password@host", ("check",), {"BERTH_BUS__URL": "http://x"}),
    (USAGE, "a database is at", ("check",), {"BERTH_DATABASE__URL": "mysql://x"}),
    (USAGE, "(context.none)", ("list",), {"BERTH_STATE_DIR": "/nonexistent"}),
    (UNREACHABLE, "start `berth up`", ("check",), {"BERTH_STATE_DIR": "/nonexistent"}),
    (UNREACHABLE, "out of reach", ("check",), {"BERTH_DATABASE__URL": "postgresql://127.0.0.1:1/x"}),
    (USAGE, "is up already", ("up",), {}),
    (USAGE, "cannot make", ("up",), {"BERTH_STATE_DIR": "/dev/null/x"}),
    (USAGE, "cannot make", ("placement", "serve"), {"BERTH_STATE_DIR": "/dev/null/x"}),
    (USAGE, "--cell cell1", ("run", "conductor"), {}),
    (USAGE, "there is no cell 'mars'", ("run", "conductor", "--cell", "mars"), {}),
    (USAGE, "there is no cell 'mars'", ("list", "--cell", "mars"), {}),
    (USAGE, "there is no cell 'mars'", ("host", "list", "--cell", "mars"), {}),
    (USAGE, "there is no cell 'mars'", ("service", "list", "--cell", "mars"), {}),
    (USAGE, "(cell.unknown)", ("host", "disable", "cell1-c1-00001", "--reason", "x", "--cell", "mars"), {}),
    (USAGE, "not a service name", ("run", "compute", "--cell", "cell1", "--service", "a b"), {}),
    (USAGE, "HOST:PORT", ("run", "scheduler", "--http", "here"), {}),
    (USAGE, "'placement'", ("run", "nope"), {}),
    (USAGE, "a database is at", ("run", "placement"), {"BERTH_DATABASE__URL": "mysql://x"}),
    (UNREACHABLE, "no bus", ("run", "compute", "--cell", "cell1"), {"BERTH_STATE_DIR": "/nonexistent"}),
]


@pytest.mark.parametrize(("status", "sentence", "arguments", "settings"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_is_reported_in_a_sentence(
    berth: Berth, status: int, sentence: str, arguments: tuple[str, ...], settings: dict[str, str]
) -> None:
    done = berth(*arguments, settings=settings)
    assert (done.status, sentence in done.out + done.err) == (status, True), done


def test_a_running_system_is_backed_up_and_is_no_target_for_a_restore(berth: Berth) -> None:
    made = berth("backup", "saved", "-o", "json")
    assert made.status == 0, made.err
    schemas = {schema["schema"]: schema for schema in made.data["schemas"]}
    assert list(schemas) == ["cell_cell1", "cell_cell2", "ironic_sync", "scheduler", "placement"]
    builds = next(table for table in schemas["scheduler"]["tables"] if table["table"] == "build_requests")
    assert builds["rows"] >= 50
    assert berth("backup", "saved", "--verify").status == 0
    again, back = berth("backup", "saved"), berth("restore", "saved")
    assert (again.status, "is there and not empty (backup.exists)" in again.err) == (NO, True), again.err
    assert (back.status, "already holds cell_cell1" in back.err) == (NO, True), back.err
    other = berth("restore", "saved", settings={"BERTH_DATABASE__URL": "embedded", "BERTH_STATE_DIR": "other"})
    assert (other.status, "as of" in other.out) == (0, True), other.err  # on the private server of another state_dir
    shown = berth("db", "list", settings={"BERTH_STATE_DIR": "other"})
    assert (shown.status, "no database" in shown.err) == (UNREACHABLE, True)  # it ended with the command


def test_the_schemas_are_shown_and_judged(berth: Berth) -> None:
    shown = berth("db", "list", "-o", "json")
    assert {one["schema"]: one["state"] for one in shown.data} == dict.fromkeys(
        ("cell_cell1", "cell_cell2", "ironic_sync", "scheduler", "placement"), "current"
    )
    assert berth("db", "check").status == 0
    cells = {"BERTH_CELLS": '{"cell1": {}, "cell2": {}, "cell3": {}}'}
    lacking = berth("db", "check", settings=cells)
    assert (lacking.status, "schema cell_cell3 is not there" in lacking.err) == (NO, True)
    unknown = berth("db", "upgrade", "--schema", "public")
    assert (unknown.status, "no schema public" in unknown.err) == (USAGE, True)
    assert berth("db", "upgrade", "--schema", "cell_cell3", settings=cells).status == 0
    assert berth("db", "check", settings=cells).status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's PostgreSQL runs as another user")
def test_a_state_dir_that_the_servers_user_may_not_enter_is_reported_in_a_sentence(berth: Berth) -> None:
    """It ended in a traceback: PostgreSQL's user could not read the file with its password."""
    with tempfile.TemporaryDirectory(prefix="berth-closed-") as closed:  # mode 0700
        for command in (("up",), ("placement", "serve", "--api", f"127.0.0.1:{free_port()}")):
            done = berth(*command, settings={"BERTH_STATE_DIR": f"{closed}/state"})
            assert done.status == USAGE, done
            assert f"may not enter {closed}," in done.err and "(directory.inaccessible)" in done.err, done


def test_up_with_a_worker_that_cannot_start_gives_its_reason_and_ends(berth: Berth) -> None:
    """It hung for ever, without a word and deaf to SIGTERM: what had started was never stopped."""
    with tempfile.TemporaryDirectory(prefix="berth-bad-") as state:
        Path(state).chmod(0o755)
        settings = {
            "BERTH_STATE_DIR": state,
            "BERTH_SCHEDULER__ENABLED_FILTERS": '["ComputeFilter", "NoSuchFilter"]',
            "BERTH_UP__REST": "false",
        }
        done = berth("up", settings=settings)
    assert done.status == USAGE, done
    assert "filter 'NoSuchFilter' is not available" in done.err and "(plugin.invalid)" in done.err, done


def test_a_port_that_is_taken_is_reported_before_anything_starts(berth: Berth) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = berth("run", "placement", "--http", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (done.status, "Address already in use" in done.err) == (UNREACHABLE, True)
    assert "(http.address)" in done.err and "phase" not in done.err, "nothing was opened before"


@pytest.mark.parametrize("serve", [("placement", "serve", "--scratch"), ("run", "placement")])
def test_a_port_of_the_api_that_is_taken_is_reported_without_a_traceback(berth: Berth, serve: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = berth(*serve, "--api", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.status == USAGE and "rest.cannot_listen" in done.err and "already in use" in done.err


def test_up_serves_placements_api_and_prints_its_address_and_token(berth: Berth) -> None:
    found = re.search(
        r"Placement +(http://127\.0\.0\.1:\d+)(?: \(.* is in use\))?, for the token in (\S+)", berth.output
    )
    assert found is not None, berth.output
    url, token = f"{found[1]}/resource_providers?name=cell1-c1-00001", Path(found[2]).read_text().strip()
    (host,) = httpx.get(url, headers={"x-auth-token": token}, timeout=TIMEOUT_S, verify=NO_TLS).json()[
        "resource_providers"
    ]
    assert host["name"] == "cell1-c1-00001"
    assert [status_of(url, {"x-auth-token": other}) for other in ("admin", "")] == [401, 401]


def test_http_of_a_placement_worker_serves_the_api_too_and_prints_who_may_call(berth: Berth) -> None:
    """The issue's own line, with no configuration: a guest of the `berth up` of this computer."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    output = berth.directory / "run.log"
    with (
        output.open("w") as log,
        berth.start("berth", "run", "placement", "--http", f"127.0.0.1:{port}", stderr=log) as worker,
    ):
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not ready(f"{url}/readyz"):
                assert worker.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.05)
            listed = httpx.get(
                f"{url}/resource_providers", headers={"x-auth-token": "admin"}, timeout=TIMEOUT_S, verify=NO_TLS
            )
            assert listed.status_code == 200 and listed.json()["resource_providers"]
            assert status_of(f"{url}/resource_providers") == 401
            assert "berth_placement" in httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, verify=NO_TLS).text
        finally:
            worker.send_signal(signal.SIGTERM)
            status = worker.wait(STOP_TIMEOUT_S)
    assert (status, f"health and metrics at {url}; auth: noauth2" in output.read_text()) == (0, True), (
        output.read_text()
    )


async def test_a_placement_worker_process_of_up_answers_for_its_health_only(berth: Berth) -> None:
    """No setting requests more doors, and each would hold a copy of placement."""
    processes = WorkerProcesses(
        berth.directory, {name: value for name, value in berth.env.items() if name.startswith("BERTH_")}
    )
    try:
        worker = processes.start("placement2", "placement")
        await processes.ready()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{worker.port}", timeout=TIMEOUT_S, verify=NO_TLS
        ) as client:
            answer = await client.get("/resource_providers", headers={"x-auth-token": "admin"})
        assert (answer.status_code, "there are /healthz" in answer.text) == (404, True)
    finally:
        await asyncio.to_thread(processes.stop)


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return status_of(url) == 200
    return False


def status_of(url: str, headers: dict[str, str] | None = None) -> int:
    return httpx.get(url, headers=headers, timeout=TIMEOUT_S, verify=NO_TLS).status_code


def test_time_that_runs_out_has_a_status_of_its_own(berth: Berth) -> None:
    """A bare-metal node takes longer than this to deploy."""
    done = berth("boot", "--flavor", "bm.silver", "--wait", "--timeout", "0.1")
    # A busy broker may not even have confirmed the request by then: another sentence, and the same status.
    assert (done.status, done.err != "") == (TIME, True)


def test_members_of_a_group_keep_apart_through_alternates_and_one_is_followed_to_its_host(berth: Berth) -> None:
    group = "00000000-0000-4000-8000-0000000000aa"
    apart = boot(berth, "--count", "6", "--group", group, "--policy", "anti-affinity")
    assert len({one["host"] for one in apart}) == 6, "one host always fails: its member went to an alternate"
    (followed,) = boot(berth, "--same-host", apart[0]["instance_uuid"])
    (elsewhere,) = boot(
        berth, "--different-host", apart[0]["instance_uuid"], "--different-host", followed["instance_uuid"]
    )
    assert followed["host"] == apart[0]["host"] != elsewhere["host"]
    assert berth("boot", "--flavor", "m1.small", "--group", group, "--policy", "alone").status == USAGE


def test_a_zone_is_asked_for_by_the_name_that_it_was_given(berth: Berth) -> None:
    host = boot(berth)[0]["host"]
    assert berth("aggregate", "create", "named").status == 0
    for zone in ("az.one", "DC1 Rack 2", "zürich"):
        made = berth("aggregate", "set", "named", "--zone", zone, "--host", host, "--force")
        assert made.status == 0, made.err
        ask = ("boot", "--flavor", "m1.tiny", "--availability-zone", zone, "--network", UNKNOWN, "--wait", "-o", "json")
        done = wait_until(lambda ask=ask: found if (found := berth(*ask)).status == 0 else None)  # it has its member
        assert done.data[0]["host"] == host
        assert berth("aggregate", "show", "named", "-o", "json").data["body"]["metadata"] == {"availability_zone": zone}
    refused = berth("aggregate", "set", "named", "--zone", "z ", "--force")
    assert refused.status == NO and "1 to 255 characters" in refused.err
    assert berth("aggregate", "delete", "named", "--force").status == 0


def test_a_group_on_record_and_the_hosts_of_an_aggregate(berth: Berth) -> None:
    assert berth("group", "create", "grouped/web", "--policy", "anti-affinity").status == 0
    apart = boot(berth, "--project", "grouped", "--count", "2", "--group", "web")
    shown = berth("group", "show", "grouped/web", "-o", "json").data
    assert shown["members"] == {one["instance_uuid"]: [one["host"]] for one in apart}
    assert "anti-affinity, max_per_host 1" in berth("group", "show", "grouped/web").out
    assert "has 2 members" in berth("group", "delete", "grouped/web").err
    assert berth("group", "delete", "grouped/web", "--force").status == 0

    hosts = [one["host"] for one in apart]
    assert (
        "would be in another availability zone"
        in berth("aggregate", "create", "w", "--zone", "w", "--host", *hosts[:1]).err
    )
    assert berth("aggregate", "create", "w", "--metadata", "a=b", "--host", hosts[0]).status == 0
    uuid = berth("aggregate", "show", "w", "-o", "json").data["body"]["uuid"]
    assert berth("aggregate", "add-host", "w", hosts[1]).status == 0
    assert berth("aggregate", "remove-host", "w", hosts[0]).status == 0
    body = berth("aggregate", "show", "w", "-o", "json").data["body"]
    assert body == {"uuid": uuid, "name": "w", "metadata": {"a": "b"}, "hosts": [hosts[1]]}
    assert "does not name" in berth("aggregate", "remove-host", "w", hosts[0]).err
    assert "there is no host no-such" in berth("aggregate", "add-host", "w", "no-such").err
    assert "there is no aggregate 'v'" in berth("aggregate", "add-host", "v", hosts[0]).err
    assert berth("aggregate", "delete", "w").status == 0


def body_of(berth: Berth, kind: str, name: str) -> dict[str, Any]:
    shown = berth(kind, "show", name, "-o", "json")
    assert shown.status == 0, shown.err
    found: dict[str, Any] = shown.data["limits"] if kind == "quota" else shown.data["body"]
    return found


SIZES = {"vcpus": 32, "memory_mb": 64}
SPECS = {"a": "1", "b": "2"}
# [verb, options, the object after them], the first of what makes it.
KEPT: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "flavor": [
        (
            "create",
            "--vcpus 16 --memory-mb 64 --disk-gb 3 --extra-spec a=1 --project p",
            {"vcpus": 16, "memory_mb": 64, "disk_gb": 3, "extra_specs": {"a": "1"}, "projects": ["p"]},
        ),
        ("set", "--vcpus 32", {**SIZES, "disk_gb": 3, "extra_specs": {"a": "1"}, "projects": ["p"]}),
        ("set", "--extra-spec b=2 --project q", {**SIZES, "disk_gb": 3, "extra_specs": SPECS, "projects": ["p", "q"]}),
        (
            "unset",
            "--extra-spec a --project p",
            {**SIZES, "disk_gb": 3, "extra_specs": {"b": "2"}, "projects": ["q"]},
        ),
        ("set", "--disk-gb 0", {**SIZES, "extra_specs": {"b": "2"}, "projects": ["q"]}),
        ("set", "--every-project", {**SIZES, "extra_specs": {"b": "2"}}),
    ],
    "quota": [
        ("set", "INSTANCES=5 VCPU=4", {"INSTANCES": 5, "VCPU": 4}),
        ("set", "VCPU=8", {"INSTANCES": 5, "VCPU": 8}),
        ("set", "MEMORY_MB=64", {"INSTANCES": 5, "VCPU": 8, "MEMORY_MB": 64}),
        ("unset", "VCPU", {"INSTANCES": 5, "MEMORY_MB": 64}),
    ],
}


@pytest.mark.parametrize("kind", KEPT)
def test_set_changes_what_is_named_and_nothing_else(berth: Berth, kind: str) -> None:
    for verb, options, after in KEPT[kind]:
        done = berth(kind, verb, "kept", *options.split())
        assert done.status == 0, done.err
        assert body_of(berth, kind, "kept") == after, options
    last = body_of(berth, kind, "kept")
    assert berth(kind, "set", "kept", *KEPT[kind][0][1].split(), "--dry-run").out.splitlines()[-1].startswith("1 would")
    assert body_of(berth, kind, "kept") == last
    assert berth(kind, "delete", "kept").status == 0


def test_a_flavor_is_not_opened_to_every_project_by_its_last_ones_removal(berth: Berth) -> None:
    assert berth("flavor", "create", "own", "--vcpus", "1", "--memory-mb", "1", "--project", "p").status == 0
    refused = berth("flavor", "unset", "own", "--project", "p")
    assert (refused.status, "(flavor.last_project)" in refused.err) == (USAGE, True)
    assert body_of(berth, "flavor", "own")["projects"] == ["p"]
    assert berth("flavor", "delete", "own").status == 0


def test_set_of_a_group_keeps_its_other_fields(berth: Berth) -> None:
    made = {"policy": "anti-affinity", "max_per_host": 2, "uuid": "00000000-0000-4000-8000-0000000000bb"}
    options = [text for key, value in made.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    assert berth("group", "create", "kept/group", *options).status == 0
    assert berth("group", "set", "kept/group", "--max-per-host", "3").status == 0
    assert berth("group", "show", "kept/group", "-o", "json").data["group"] == {**made, "max_per_host": 3}
    assert berth("group", "delete", "kept/group").status == 0


def test_set_of_rules_keeps_the_other_rules(berth: Berth) -> None:
    try:
        assert berth("rule", "set", "--multiplier", "ram=-1", "--host-subset-size", "3").status == 0
        assert berth("rule", "set", "--multiplier", "cpu=2").status == 0
        kept = {"multipliers": {"ram": -1.0, "cpu": 2.0}, "host_subset_size": 3}
        assert body_of(berth, "rule", "default") == kept
        assert berth("rule", "unset", "host-subset-size", "--multiplier", "ram").status == 0
        assert body_of(berth, "rule", "default") == {"multipliers": {"cpu": 2.0}}
        assert berth("rule", "set").status == berth("rule", "unset").status == USAGE
    finally:
        assert berth("rule", "delete", "default").status == 0


def test_set_of_an_aggregate_keeps_its_other_fields(berth: Berth) -> None:
    hosts = sorted(one["name"] for one in berth("host", "list", "-o", "json").data)[:2]
    made = berth("aggregate", "create", "kept", "--metadata", "a=1", "--metadata", "b=2", "--host", hosts[0])
    assert made.status == 0, made.err
    uuid = body_of(berth, "aggregate", "kept")["uuid"]
    first = {"uuid": uuid, "name": "kept", "metadata": {"a": "1", "b": "2"}, "hosts": hosts[:1]}
    for verb, options, after in (
        ("set", ("--metadata", "c=3"), {**first, "metadata": {"a": "1", "b": "2", "c": "3"}}),
        ("set", ("--host", hosts[1]), {**first, "metadata": {"a": "1", "b": "2", "c": "3"}, "hosts": hosts}),
        ("unset", ("--metadata", "b"), {**first, "metadata": {"a": "1", "c": "3"}, "hosts": hosts}),
        ("set", ("--hosts-in-placement",), {"uuid": uuid, "name": "kept", "metadata": {"a": "1", "c": "3"}}),
    ):
        done = berth("aggregate", verb, "kept", *options, "--force")
        assert done.status == 0, done.err
        assert body_of(berth, "aggregate", "kept") == after, options
    assert berth("aggregate", "delete", "kept").status == 0


def test_objects_are_changed_while_everything_runs(berth: Berth) -> None:
    """Flavors, quotas, aggregates and rules: listed, changed, refused, logged, and kept in a file."""
    assert "m1.small" in {one["name"] for one in berth("flavor", "list", "-o", "json").data}
    made = berth("flavor", "create", "cli.tiny", "--vcpus", "1", "--memory-mb", "64", "--reason", "t\nforged")
    assert (made.status, made.out.startswith("+ flavor cli.tiny: ")) == (0, True), made.err
    done = berth("boot", "--flavor", "cli.tiny", "--wait", "-o", "json")
    assert done.status == 0, done.err
    in_use = berth("flavor", "delete", "cli.tiny")
    assert (in_use.status, "object.in_use" in in_use.err) == (NO, True)
    assert berth("flavor", "delete", "cli.tiny", "--force", "--dry-run").out.startswith(
        "- flavor cli.tiny\n1 would change"
    )
    assert berth("flavor", "show", "cli.tiny").status == 0, "nothing was changed"

    limited = berth("quota", "set", "cli-project", "INSTANCES=1", "VCPU=4", "-o", "json")
    assert limited.data["changed"][0]["after"] == {"limits": {"INSTANCES": 1, "VCPU": 4}}
    both = berth("boot", "--flavor", "cli.tiny", "--count", "2", "--project", "cli-project", "--wait", "-o", "json")
    assert (both.status, sorted(one["code"] for one in both.data)) == (NO, ["", "quota.exceeded"])

    (use,) = [one for one in berth("quota", "list", "-o", "json").data if one["project"] == "cli-project"]
    assert (use["quota"], use["limits"]) == ("cli-project", {"INSTANCES": 1, "VCPU": 4})
    assert (use["used"]["INSTANCES"], use["used"]["VCPU"]) == (1, 1)
    assert "INSTANCES 1 of 1, VCPU 1 of 4" in berth("quota", "list").out
    text = "[quotas.cli-project]\n# 1 used\nINSTANCES = 1\n# 1 used\nVCPU = 4\n"
    assert berth("quota", "show", "cli-project").out == text
    assert berth("quota", "show", "nobody").status == NO

    entries = berth("event", "list", "--name", "cli.tiny", "-o", "json").data
    assert [(one["actor"], one["reason"]) for one in entries] == [("local", "t\nforged")]
    table = berth("event", "list", "--name", "cli.tiny", "-o", "wide").out
    assert len(table.splitlines()) <= 4 and "t\\nforged" in table, "a newline forges no row"


def test_an_instance_is_named_by_its_name_or_its_first_letters(berth: Berth) -> None:
    uuids = [boot(berth, "--name", "named", "--project", project)[0]["instance_uuid"] for project in ("n1", "n2")]
    twice = berth("show", "named")
    assert (twice.status, "(name.ambiguous)" in twice.err) == (NO, True)
    assert all(one in twice.err for one in uuids)
    for name in (["named", "--project", "n1"], [uuids[0][:8]], [uuids[0].upper()]):
        assert berth("show", *name, "-o", "json").data["instance_uuid"] == uuids[0]
    assert berth("show", uuids[0][:3]).status == NO, "three letters are never enough"
    assert berth("delete", "named", "--project", "n1", "--wait", "--yes").status == 0
    assert berth("show", "named", "-o", "name").out.strip() == "named"
    assert berth("claim", "show", "named", "-o", "json").data["consumer"] == uuids[1]
    assert berth("instance", "stop", "named", "--wait").status == 0
    ended = berth("logs", "named")
    assert (ended.status, "requested m1.small for n2; by " in ended.out.splitlines()[0]) == (0, True)
    lines = [json.loads(line) for line in berth("logs", "named", "-o", "json").out.splitlines()]
    assert lines[-1]["what"] == "stop done" and lines[0]["at"].endswith("Z")
    assert [one["kind"] for one in berth("action", "list", "--instance", "named", "-o", "json").data] == ["stop"]


def test_the_log_of_a_build_is_followed_until_its_end(berth: Berth) -> None:
    (one,) = berth("boot", "--flavor", "m1.small", "--name", "followed", "-o", "json").data
    lines = berth("logs", one["instance_uuid"], "--project", "default").out.splitlines()
    assert " active " in lines[-1] and sum("requested" in line for line in lines) == 1


def test_why_names_what_happened_and_what_to_do(berth: Berth) -> None:
    """Of an instance that no host takes, of a request about one by its id, and of one that is well."""
    failed = berth("boot", "--flavor", "m1.small", "--host", "no-such-host", "--wait", "-o", "json").data[0]
    found = berth("why", failed["instance_uuid"], "-o", "json").data
    assert (found["request"], found["request_state"], found["code"]) == ("build", "failed", failed["code"])
    assert found["funnel"] and found["cause"] and found["remedy"] and "--history" not in found["next"][0]
    text = berth("why", failed["instance_uuid"]).out
    assert failed["code"] in text and "what to do:" in text and " left" in text
    well = boot(berth, "--name", "well", "--project", "why")[0]["instance_uuid"]
    assert berth("why", "well", "--project", "why", "-o", "json").data["code"] == ""
    assert berth("instance", "confirm", "well", "--project", "why", "--wait").status == NO
    (refused,) = berth("action", "list", "--instance", "well", "-o", "json").data
    for text in ("well", refused["request_id"]):
        found = berth("why", text, "--project", "why", "-o", "json").data
        assert (found["instance_uuid"], found["request"], found["code"]) == (well, "confirm", refused["code"])
    unknown = berth("why", "7f3c2f5e-0000-4000-8000-000000000000")
    assert (unknown.status, "(instance.unknown)" in unknown.err) == (NO, True)


def test_instances_are_chosen_by_project_state_and_name(berth: Berth) -> None:
    boot(berth, "--name", "some", "--project", "several", "--count", "3")
    of = ("--project", "several", "--name", "some-[12]")
    planned = berth("instance", "stop", *of, "--dry-run", "-o", "value", "-c", "name")
    assert planned.status == USAGE, "columns are for lists"
    planned = berth("instance", "stop", *of, "--dry-run", "-o", "json")
    assert {one["name"] for one in planned.data} == {"some-1", "some-2"}
    asked = berth("instance", "stop", *of)
    assert (asked.status, "2 instances" in asked.err, asked.out.count("some-")) == (USAGE, True, 2)
    stopped = berth("instance", "stop", *of, "--yes", "--wait", "-o", "json")
    assert (stopped.status, [one["state"] for one in stopped.data]) == (0, ["done", "done"]), stopped
    states = berth("list", "--project", "several", "--sort", "name", "-o", "value", "-c", "state").out.split()
    assert states == ["stopped", "stopped", "active"]
    gone = berth("delete", "--project", "several", "--state", "stopped", "--yes", "--wait", "-o", "json")
    assert (gone.status, [one["state"] for one in gone.data]) == (0, ["deleted", "deleted"]), gone
    left = berth("list", "--project", "several", "--filter", "state=active", "-o", "value", "-c", "name")
    assert left.out.split() == ["some-3"]
    nothing = berth("delete", "--project", "several", "--state", "failed", "--yes")
    assert (nothing.status, len(nothing.out.splitlines())) == (0, 1)


def test_a_list_of_instances_goes_on_where_it_ended(berth: Berth) -> None:
    made = {one["instance_uuid"] for one in boot(berth, "--project", "paged", "--count", "5")}
    seen: list[str] = []
    words: list[str] = []
    while True:
        page = json.loads(berth("list", "--project", "paged", "--limit", "2", *words, "-o", "json").out)
        seen += [one["instance_uuid"] for one in page["items"]]
        if page["next"] is None:
            break
        words = page["next"].split()
    assert len(seen) == 5 and set(seen) == made
    said = berth("list", "--project", "paged", "--limit", "2").err
    assert said.startswith("2 of 5, next: berth list --project paged --limit 2 --page ")
    assert berth("list", "--page", "x").status == USAGE


def test_builds_are_listed_by_host_code_and_time(berth: Berth) -> None:
    [one] = boot(berth, "--project", "listed")
    uuid = one["instance_uuid"]
    build = berth("show", uuid, "-o", "json").data
    host, elsewhere = build["host"], {"cell1": "cell2", "cell2": "cell1"}[build["cell"]]
    mine = ("list", "--project", "listed", "-o", "json")
    assert [build["instance_uuid"] for build in berth(*mine, "--host", host).data] == [uuid]
    assert [build["instance_uuid"] for build in berth(*mine, "--after", "2001-01-01").data] == [uuid]
    for other in (("--host", "no"), ("--code", "no"), ("--cell", elsewhere), ("--before", "2001-01-01")):
        assert berth(*mine, *other).data == []
    assert berth("list", "--cell", "../x").status == USAGE


def test_a_cell_is_disabled_and_enabled(berth: Berth) -> None:
    listed = {one["name"]: one for one in berth("cell", "list", "-o", "json").data}
    assert {name: (one["state"], one["version"]) for name, one in listed.items()} == {
        "cell1": ("enabled", 0),
        "cell2": ("enabled", 0),
    }
    assert berth("cell", "disable", "cell1", "--reason", "power").status == 0
    try:
        assert {build["cell"] for build in boot(berth, "--count", "4")} == {"cell2"}
        assert 'state = "disabled"' in berth("object", "export").out
        last = berth("cell", "disable", "cell2", "--reason", "power")
        assert (last.status, "no cell would be left" in last.err) == (NO, True)
    finally:
        assert berth("cell", "enable", "cell1").status == 0
        assert berth("cell", "delete", "cell1").status == 0


def test_a_file_of_objects_is_applied_all_or_none(berth: Berth) -> None:
    before = berth("object", "export").out
    file = berth.directory / "objects.toml"
    file.write_text(before + '\n[flavors."file.one"]\nvcpus = 1\n\n[quotas.filed]\nVCPU = 3\n')
    output = berth("apply", str(file), "--dry-run").out
    assert output.splitlines()[:2] == ['+ flavor file.one: {"vcpus":1}', '+ quota filed: {"limits":{"VCPU":3}}']
    assert berth("object", "export").out == before
    assert berth("apply", str(file)).status == 0
    assert berth("apply", str(file)).out.startswith("0 changed")
    file.write_text(before + '\n[flavors."file.two"]\nvcpus = 1\nextra_specs = {"resources:VCPU" = "many"}\n')
    wrong = berth("apply", str(file), "--prune")
    assert (wrong.status, "flavor.invalid" in wrong.err) == (NO, True)
    file.write_text(before)
    assert berth("apply", str(file), "--prune").status == USAGE
    pruned = berth("apply", str(file), "--prune", "--yes")
    assert pruned.out.startswith("- flavor file.one\n"), pruned.out
    assert "file.one" not in berth("object", "export").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flavor", "create", "x", "--extra-spec", "novalue"), "KEY=VALUE"),
        (("quota", "set", "x", "VCPU=many"), "no number"),
        (("quota", "set", "x", "vcpu=1"), "quota 'x'"),
        (("quota", "set", "x", "CORES=1"), "no resource class CORES"),
        (
            ("flavor", "create", "x", "--vcpus", "1", "--memory-mb", "1", "--extra-spec", "resources:VGPUS=1"),
            "no resource class VGPUS",
        ),
        (("flavor", "create", "x", "--vcpus", "2"), "name --memory-mb"),
        (("flavor", "create", "x", "--disk-gb", "2"), "(flavor.incomplete)"),
        (("flavor", "create", "m1.tiny", "--vcpus", "1"), "(object.exists)"),
        (("flavor", "set", "x", "--vcpus", "1"), "(object.unknown)"),
        (("flavor", "unset", "m1.tiny", "--extra-spec", "none"), "has no extra spec none"),
        (("quota", "set", "x"), "CLASS=AMOUNT"),
        (("quota", "unset", "x", "VCPU"), "(object.unknown)"),
        (("group", "create", "a/b", "--max-per-host", "2"), "--policy"),
        (("placement", "export", "no/such/place"), "no/such/place: No such file or directory (placement.file)"),
        (("aggregate", "create", "x", "--uuid", "no"), "no uuid"),
        (("group", "create", "web", "--policy", "affinity"), "PROJECT/NAME"),
        (("group", "show", "a/b"), "there is no group 'a/b'"),
        (("rule", "set", "--filter", "NoSuchFilter"), "NoSuchFilter"),
        (("rule", "show", "default"), "each scheduler goes by the section scheduler of its own settings"),
        (("cell", "enable", "cell9"), "there is no cell 'cell9'"),
        (("flavor", "show", "no-such"), "there is no flavor 'no-such'"),
        (("apply", "no-such.toml"), "no-such.toml"),
    ],
)
def test_a_mistake_about_objects_is_a_sentence(berth: Berth, arguments: tuple[str, ...], message: str) -> None:
    done = berth(*arguments)
    assert done.status in {NO, USAGE}
    assert message in done.err
