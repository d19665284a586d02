"""The journal and what is remembered through it: ended attempts, repeats, hosts that were restored."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock, new_uuid
from bus.contracts.cell import ComputeOutcome, ComputeResult
from bus.faults import Forbidden
from compute_agent.driver import Machine
from compute_agent.records import records as records_module
from compute_agent.records.attempt import (
    LOST,
    AttemptPhase,
    DestroyAction,
    HostAttempt,
    SpawnAction,
    answer,
    built,
    destroyed,
    failed,
    on_destroy,
    on_spawn,
)
from compute_agent.records.journal import MAX_KEPT, MAX_LINE, NOT_WRITTEN, Journal, JournalInUse, JournalUnusable
from compute_agent.records.records import PurgeRow, Records
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import Faults
from compute_sim.fleet import Fleet, SimulatedMachine
from tests.unit.compute_agent.test_agent import HOSTS, INSTANCES, Scripted, destroy, spawn, started

# --- the journal and what is remembered through it


A = "host-a"
DATABASE_ID = "d"


def rows(path: Path) -> list[PurgeRow]:
    journal = Journal(path, PurgeRow)
    found = journal.open()
    journal.close()
    return found


def test_a_torn_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    journal = Journal(path, PurgeRow)
    journal.open()
    journal.append([PurgeRow("a", "1"), PurgeRow("b", "2")])
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path, PurgeRow)
    assert journal.open() == [PurgeRow("a", "1")]
    journal.append([PurgeRow("c", "3")])
    journal.close()
    assert rows(path) == [PurgeRow("a", "1"), PurgeRow("c", "3")]


@contextmanager
def full_after(length: int) -> Iterator[None]:
    """No file can be longer than this meanwhile: what is longer is cut short, and then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_service_and_costs_no_row_that_is_written_later(tmp_path: Path) -> None:
    """A command that came again was acknowledged, on record nowhere; the next row stood behind the half of its own."""
    path = tmp_path / "x.records"
    records = Records(path)
    records.open()
    records.put((A, "1"), HostAttempt(1, AttemptPhase.RUNNING))
    with full_after(path.stat().st_size + 10), pytest.raises(Forbidden) as ended:
        records.put((A, "2"), HostAttempt(1, AttemptPhase.BUILDING))
    assert ended.value.code == NOT_WRITTEN
    records.put((A, "3"), HostAttempt(1, AttemptPhase.RUNNING))  # a job that ends while the service does
    records.close()
    again = Records(path)
    again.open()
    assert [key for key, _ in again.entries()] == [(A, "1"), (A, "3")]
    again.close()
    assert [one.name for one in tmp_path.iterdir() if "damaged" in one.name] == []


def test_a_rewrite_that_finds_no_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    whole = written(path, ROWS)
    journal = Journal(path, PurgeRow)
    journal.open()
    with full_after(10), pytest.raises(JournalUnusable):
        journal.rewrite(ROWS[:2])
    journal.close()
    assert path.read_bytes() == whole and not path.with_name("x.records.new").exists()


ROWS = [PurgeRow(f"host-{number}", str(number)) for number in range(3)]


def written(path: Path, many: list[PurgeRow]) -> bytes:
    path.unlink(missing_ok=True)
    journal = Journal(path, PurgeRow)
    journal.open()
    journal.append(many)
    journal.close()
    return path.read_bytes()


def test_each_damaged_byte_is_noticed_and_costs_no_other_row(tmp_path: Path) -> None:
    """Every byte of a journal, turned into each of several others: the service starts, and nothing is lost unsaid."""
    path = tmp_path / "x.records"
    whole = written(path, ROWS)
    for offset in range(len(whole)):
        for wrong in (0x00, 0xFF, ord("\n"), ord("\t"), ord(" "), ord('"'), ord("7"), whole[offset] ^ 1):
            if wrong == whole[offset]:
                continue
            path.write_bytes(whole[:offset] + bytes((wrong,)) + whole[offset + 1 :])
            journal = Journal(path, PurgeRow, synced=False)
            found = journal.open()
            journal.close()
            damage = journal.damage
            assert damage is not None and abs(damage.offset - offset) <= len(whole) // len(ROWS)
            hit = whole[:offset].count(b"\n")
            of_two = whole[offset : offset + 1] == b"\n"  # without the end between them two lines are one
            assert [row for row in ROWS if row in found] == found
            assert {*ROWS} - {*found} <= {*ROWS[hit : hit + 1 + of_two]}
            kept = Path(damage.kept)
            assert kept.read_bytes() == whole[:offset] + bytes((wrong,)) + whole[offset + 1 :]
            assert rows(path) == found  # the next start finds nothing damaged
            kept.unlink()


def test_a_journal_of_a_release_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    path.write_bytes(b'["f","a","1"]\n["f","b","2"]\n')
    journal = Journal(path, PurgeRow)
    assert journal.open() == [PurgeRow("a", "1"), PurgeRow("b", "2")]
    assert journal.damage is None
    journal.append([PurgeRow("c", "3")])
    journal.close()
    assert rows(path) == [PurgeRow("a", "1"), PurgeRow("b", "2"), PurgeRow("c", "3")]


@pytest.mark.parametrize(
    "damaged",
    [
        b"{nonsense}\n",
        b'["f","\xff","1"]\n',
        b"[" * 100_000 + b"\n",
        bytes(5000) + b"\n",
        b"\n",
        b"x" * (MAX_LINE + 10) + b"\n",
        b"x" * (MAX_LINE + 10),
    ],
    ids=["nonsense", "no text", "nested", "zeros", "empty", "too long", "too long and torn"],
)
def test_a_damaged_line_is_kept_in_a_file_of_its_own_and_logged_with_file_and_offset(
    tmp_path: Path, damaged: bytes
) -> None:
    path = tmp_path / "x.records"
    first = written(path, ROWS[:1])
    rest = written(path, ROWS[1:]) if damaged.endswith(b"\n") else b""
    path.write_bytes(first + damaged + rest)
    journal = Journal(path, PurgeRow)
    with capture_logs() as logs:
        found = journal.open()
    journal.close()
    assert found == (ROWS if rest else ROWS[:1])
    (logged,) = [line for line in logs if line["event"] == "journal.damaged"]
    assert (logged["file"], logged["offset"], logged["lines"], logged["length"]) == (
        str(path),
        len(first),
        1,
        len(damaged),
    )
    assert Path(logged["kept"]).read_bytes() == first + damaged + rest
    assert Path(logged["kept"]).stat().st_mode & 0o777 == 0o600


def test_a_disk_that_damages_again_and_again_stops_the_service_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    for _ in range(MAX_KEPT):
        path.write_bytes(b"nonsense\n")
        rows(path)
    path.write_bytes(b"nonsense\n")
    journal = Journal(path, PurgeRow)
    with pytest.raises(JournalUnusable, match=rf"{path} is damaged at byte 0 .* {MAX_KEPT} damaged ones are kept"):
        journal.open()
    journal.close()
    assert path.read_bytes() == b"nonsense\n"
    assert JournalUnusable.code == "journal.damaged" and issubclass(JournalUnusable, Forbidden)


def _opened(path: Path, hosts: int = 1) -> Fleet:
    """The fleet of this directory, and its service's records, as they were left there."""
    records = Records.of_service(str(path), "c1", "s", synced=False)
    records.open()
    fleet = Fleet.planned(SimulatedConfig(hosts=hosts), "c1", "s", records, str(path))
    fleet.open()
    return fleet


def _close(fleet: Fleet) -> None:
    fleet.close()
    fleet.records.close()


async def test_machines_whose_lines_are_damaged_are_neither_lost_nor_destroyed(tmp_path: Path) -> None:
    """Each line of the machines' journal, and each two: what the records have running is there after the start."""
    host, instances = _fleet_with_a_rebuilt_machine(tmp_path)
    machines, records = tmp_path / "c1.s.machines", tmp_path / "c1.s.records"
    lines, recorded = machines.read_bytes().splitlines(keepends=True), records.read_bytes()
    for first, count in [(first, count) for first in range(len(lines)) for count in (1, 2)]:
        wrong = [b"x" + line[1:] for line in lines[first : first + count]]
        machines.write_bytes(b"".join([*lines[:first], *wrong, *lines[first + count :]]))
        records.write_bytes(recorded)
        fleet = _opened(tmp_path)
        service = await started(
            SimulatedDriver(fleet, Faults(), seed=1, clock=SystemClock(), nested=True), fleet.records
        )
        await service.rest()
        assert {machine.instance_uuid: machine.attempt for _, machine in fleet.machines()} == {
            instances[0]: 2,
            instances[1]: 1,
        }
        assert set(fleet.records.running()) == {(host, instance) for instance in instances}
        _close(fleet)


def _fleet_with_a_rebuilt_machine(path: Path) -> tuple[str, list[str]]:
    """One instance that was destroyed once and built again, and one that was built once."""
    fleet = _opened(path)
    (host,) = (each.plan.uuid for each in fleet.hosts)
    instances = [new_uuid(random.Random(number)) for number in range(2)]
    fleet.put(host, SimulatedMachine(instances[0], 1, {host: {"VCPU": 1}}, database_id=DATABASE_ID))
    fleet.remove(host, instances[0])
    fleet.put(host, SimulatedMachine(instances[0], 2, {host: {"VCPU": 1}}, database_id=DATABASE_ID))
    fleet.put(host, SimulatedMachine(instances[1], 1, {host: {"VCPU": 1}}, database_id=DATABASE_ID))
    fleet.records.put(
        (host, instances[0]), HostAttempt(2, AttemptPhase.RUNNING, max_ended_attempt=1, database_id=DATABASE_ID)
    )
    fleet.records.put((host, instances[1]), HostAttempt(1, AttemptPhase.RUNNING, database_id=DATABASE_ID))
    _close(fleet)
    return host, instances


def test_only_one_process_has_it(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "x.records", PurgeRow), Journal(tmp_path / "x.records", PurgeRow)
    first.open()
    with pytest.raises(JournalInUse):
        second.open()
    first.close()
    assert second.open() == []
    second.close()


def test_a_rewrite_replaces_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    journal = Journal(path, PurgeRow)
    journal.open()
    journal.append([PurgeRow("a", str(n)) for n in range(2500)])
    journal.rewrite(PurgeRow("b", str(n)) for n in range(1500))
    journal.append([PurgeRow("c", "1")])
    assert journal.rows == 1501
    journal.close()
    assert rows(path) == [*(PurgeRow("b", str(n)) for n in range(1500)), PurgeRow("c", "1")]


STEPS = ["spawn", "destroy", "fail", "clear", "reported"]
STEP = st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(1, 4))


@given(steps=st.lists(STEP, max_size=60))
def test_what_is_read_back_is_what_was_known(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> None:  # fmt: skip  # noqa: E501
    path = tmp_path_factory.mktemp("r") / "s.records"
    records = Records(path, synced=False)
    records.open()
    for what, number, attempt in steps:
        key = (A, str(number))
        entry = records.get(key)
        after: HostAttempt | None = None
        if what == "spawn":
            after = on_spawn(entry, attempt)[1]
        elif what == "destroy":
            after = on_destroy(entry, attempt)[1]
        elif what == "fail":
            after = failed(entry, attempt, "x", "y")
        elif what == "clear":
            after = destroyed(entry)
        else:
            records.reported([_result(key, attempt, outcome) for outcome in ComputeOutcome])
        if after is not None:
            records.put(key, after)
    records.close()
    again = Records(path, synced=False)
    again.open()
    assert dict(again.entries()) == dict(records.entries())
    assert again.running() == records.running()
    again.close()


def _result(key: tuple[str, str], attempt: int, outcome: ComputeOutcome) -> ComputeResult:
    return ComputeResult(instance_uuid=key[1], attempt=attempt, host_uuid=key[0], service="s", outcome=outcome)


def test_epochs_and_versions_rise_also_when_the_clock_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "s.records"
    seen: list[int] = []
    epochs: list[int] = []
    for now in (1_000.0, 1_000.0, 900.0, 2_000.0):
        records = Records(path)
        records.open()
        epochs.append(records.start(now))
        for _ in range(3):
            first = records.versions(5, now)
            seen += range(first, first + 5)
        records.close()
    assert epochs == sorted(set(epochs)) and seen == sorted(set(seen)) and max(seen) < 2**62


def test_old_ends_are_forgotten_and_running_machines_never(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records_module, "MAX_ENDED", 10)
    monkeypatch.setattr(records_module, "REWRITE_AFTER", 20)
    records = Records(tmp_path / "s.records", synced=False)
    records.open()
    records.put((A, "keeps"), HostAttempt(1, AttemptPhase.RUNNING))
    for number in range(200):
        records.put((A, str(number)), HostAttempt(1, AttemptPhase.GONE, max_ended_attempt=1))
    known = dict(records.entries())
    assert len(known) == 11 and (A, "keeps") in known and (A, "199") in known and (A, "0") not in known
    records.close()
    assert len((tmp_path / "s.records").read_bytes().splitlines()) < 100
    again = Records(tmp_path / "s.records", synced=False)
    again.open()
    assert dict(again.entries()) == known
    again.close()


def test_a_fleet_is_read_back_with_its_machines_and_operators_wishes(tmp_path: Path) -> None:
    fleet = _opened(tmp_path, hosts=3)
    first, second, _ = (host.plan.uuid for host in fleet.hosts)
    fleet.put(first, SimulatedMachine("i1", 2, {first: {"VCPU": 1}}))
    fleet.put(first, SimulatedMachine("i2", 1, {}, complete=False))
    fleet.put(second, SimulatedMachine("i3", 1, {}))
    fleet.remove(second, "i3")
    fleet.disable(second, "fan")
    fleet.resize(first, HostSize(vcpus=3))
    _close(fleet)
    again = _opened(tmp_path, hosts=3)
    assert list(again.machines()) == list(fleet.machines()) and len(list(again.machines())) == 2
    host = again.host(second)
    assert host is not None and (host.enabled, host.disabled_reason) == (False, "fan")
    resized = again.host(first)
    assert resized is not None and resized.size.vcpus == 3
    _close(again)


# --- ended attempts and repeats: a table of single steps, and a machine of random ones


B, R, F, D, G = (
    AttemptPhase.BUILDING,
    AttemptPhase.RUNNING,
    AttemptPhase.FAILED,
    AttemptPhase.DESTROYING,
    AttemptPhase.GONE,
)


@pytest.mark.parametrize(
    ("entry", "attempt", "action", "after"),
    [
        (None, 1, SpawnAction.START, HostAttempt(1, B)),
        (HostAttempt(1, B), 1, SpawnAction.UNDERWAY, HostAttempt(1, B)),
        (HostAttempt(1, R), 1, SpawnAction.REPEAT, HostAttempt(1, R)),
        (HostAttempt(1, F, code="x"), 1, SpawnAction.REPEAT, HostAttempt(1, F, code="x")),
        (HostAttempt(1, D, max_ended_attempt=1), 1, SpawnAction.ALREADY_ENDED, HostAttempt(1, D, max_ended_attempt=1)),
        (HostAttempt(1, G, max_ended_attempt=3), 2, SpawnAction.ALREADY_ENDED, HostAttempt(1, G, max_ended_attempt=3)),
        (HostAttempt(1, G, max_ended_attempt=3), 4, SpawnAction.START, HostAttempt(4, B, max_ended_attempt=3)),
        (HostAttempt(3, B), 2, SpawnAction.SUPERSEDED, HostAttempt(3, B)),
        (HostAttempt(1, B), 2, SpawnAction.REPLACE, HostAttempt(2, B, max_ended_attempt=1)),
        (HostAttempt(1, R), 2, SpawnAction.REPLACE, HostAttempt(2, B, max_ended_attempt=1)),
        (HostAttempt(1, F), 2, SpawnAction.REPLACE, HostAttempt(2, B, max_ended_attempt=1)),
        (HostAttempt(1, D, max_ended_attempt=2), 3, SpawnAction.REPLACE, HostAttempt(3, B, max_ended_attempt=2)),
    ],
)
def test_spawn(entry: HostAttempt | None, attempt: int, action: SpawnAction, after: HostAttempt) -> None:
    assert on_spawn(entry, attempt) == (action, after)


@pytest.mark.parametrize(
    ("entry", "attempt", "action", "after"),
    [
        (None, 1, DestroyAction.DESTROY, HostAttempt(1, D, max_ended_attempt=1)),
        (HostAttempt(1, B), 1, DestroyAction.DESTROY, HostAttempt(1, D, max_ended_attempt=1)),
        (HostAttempt(1, R, reported=True), 2, DestroyAction.DESTROY, HostAttempt(1, D, max_ended_attempt=2)),
        (HostAttempt(1, F, code="x"), 1, DestroyAction.DESTROY, HostAttempt(1, D, max_ended_attempt=1)),
        (HostAttempt(1, D, max_ended_attempt=1), 1, DestroyAction.JOIN, HostAttempt(1, D, max_ended_attempt=1)),
        (HostAttempt(1, D, max_ended_attempt=1), 2, DestroyAction.JOIN, HostAttempt(1, D, max_ended_attempt=2)),
        (
            HostAttempt(1, G, max_ended_attempt=1, reported=True),
            1,
            DestroyAction.DESTROY,
            HostAttempt(1, D, max_ended_attempt=1, reported=True),
        ),
        (
            HostAttempt(1, G, max_ended_attempt=1, reported=True),
            2,
            DestroyAction.DESTROY,
            HostAttempt(1, D, max_ended_attempt=2),
        ),
        (
            HostAttempt(3, R, reported=True),
            2,
            DestroyAction.STALE,
            HostAttempt(3, R, max_ended_attempt=2, reported=True),
        ),
        (HostAttempt(3, B, max_ended_attempt=2), 1, DestroyAction.STALE, HostAttempt(3, B, max_ended_attempt=2)),
        (HostAttempt(3, F, code=LOST), 2, DestroyAction.STALE, HostAttempt(3, F, code=LOST, max_ended_attempt=2)),
        (
            HostAttempt(3, F, code="x", max_ended_attempt=2),
            2,
            DestroyAction.DESTROY,
            HostAttempt(3, D, max_ended_attempt=3),
        ),
    ],
)
def test_destroy(entry: HostAttempt | None, attempt: int, action: DestroyAction, after: HostAttempt) -> None:
    assert on_destroy(entry, attempt) == (action, after)


def test_a_late_end_of_an_attempt_that_is_no_more_changes_nothing() -> None:
    for entry in (
        None,
        HostAttempt(2, B),
        HostAttempt(1, D, max_ended_attempt=1),
        HostAttempt(1, G, max_ended_attempt=1),
        HostAttempt(1, R),
    ):
        assert built(entry, 1) is None
        assert failed(entry, 1, "x", "") is None
    assert destroyed(HostAttempt(2, B, max_ended_attempt=1)) is None


class OneHost(RuleBasedStateMachine):
    """One instance on one host under any mix of commands, against a plain account of what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.entry: HostAttempt | None = None
        self.ended = 0  # highest attempt ever asked to be destroyed
        self.started: list[int] = []
        self.ends: dict[int, ComputeOutcome] = {}

    @rule(attempt=st.integers(1, 5))
    def spawn(self, attempt: int) -> None:
        action, self.entry = on_spawn(self.entry, attempt)
        if action in (SpawnAction.START, SpawnAction.REPLACE):
            assert attempt > self.ended, "a destroyed attempt started"
            assert attempt not in self.started, "an attempt started twice"
            assert all(attempt > older for older in self.started), "an older attempt started after a newer one"
            self.started.append(attempt)
        if action is SpawnAction.REPEAT:
            assert answer(self.entry) == (attempt, self.ends[attempt]), "another answer than the first time"

    @rule(attempt=st.integers(1, 5))
    def destroy(self, attempt: int) -> None:
        before = self.entry
        action, self.entry = on_destroy(self.entry, attempt)
        self.ended = max(self.ended, attempt)
        if action is DestroyAction.STALE:
            assert before is not None and before.attempt > attempt
            assert (self.entry.attempt, self.entry.phase) == (before.attempt, before.phase)
        if before is not None and before.phase is G:
            assert action is DestroyAction.DESTROY, "what is ordered again is looked for again"

    @rule(works=st.booleans(), attempt=st.integers(1, 5))
    def end(self, works: bool, attempt: int) -> None:
        after = built(self.entry, attempt) if works else failed(self.entry, attempt, "no", "")
        if after is not None:
            assert attempt not in self.ends
            self.ends[attempt] = ComputeOutcome.ACTIVE if works else ComputeOutcome.FAILED
            self.entry = after

    @rule()
    def cleared(self) -> None:
        self.entry = destroyed(self.entry) or self.entry

    @invariant()
    def fence_is_kept(self) -> None:
        if self.entry is not None:
            assert self.entry.max_ended_attempt >= self.ended
            if self.entry.phase in (B, R, F):
                assert self.entry.attempt > self.ended


OneHost.TestCase.settings = settings(stateful_step_count=30)
TestOneHost = OneHost.TestCase


# --- a service starts over hosts that were restored while it was stopped: what it had destroyed runs again


KEY = (HOSTS[0], INSTANCES[0])


class LeavesMachines(Scripted):
    """Hosts whose manager reports that their machines are gone, while the marks stay: nothing is done about them."""

    left = False

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """As marked."""
        found = await super().list(hosts)
        return {host: [replace(one, tag_only=self.left) for one in machines] for host, machines in found.items()}

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        """It changes nothing."""
        self.destroys += 1


@pytest.mark.parametrize("phase", ["destroyed", "replaced and destroyed"])
async def test_what_was_destroyed_and_runs_again_is_destroyed_at_the_start(phase: str) -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0))
    last = 1 if phase == "destroyed" else 2
    if last == 2:
        await service.carry_out(spawn(0, attempt=2))
    await service.carry_out(destroy(0, attempt=last))
    assert not driver.machines
    driver.machines[KEY] = 1  # the host's disk is what it was
    again = await started(driver, service.records)
    await again.rest()
    assert not driver.machines
    assert [(result.attempt, result.outcome) for result in again.results] == [(last, ComputeOutcome.DESTROYED)]


async def test_a_newer_machine_than_what_was_destroyed_stays() -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0), destroy(0), spawn(0, attempt=2))
    assert driver.machines == {KEY: 2}
    again = await started(driver, service.records)
    await again.rest()
    assert driver.machines == {KEY: 2}


async def test_a_machine_that_is_left_as_it_is_counts_as_leaving_once_its_attempt_has_ended() -> None:
    """Seed 1094: an operator cleared `instance_uuid` alone; each report had both conductors order its destruction."""
    driver = LeavesMachines()
    service = await started(driver)
    await service.carry_out(spawn(0))
    driver.left = True

    async def leaving() -> list[bool]:
        return [one.destroying for one in (await service.scanner.running())[HOSTS[0]]]

    assert await leaving() == [False], "no client has asked for its end"
    await service.carry_out(destroy(0))
    assert driver.machines == {KEY: 1} and await leaving() == [True]
    assert [result.outcome for result in service.results][-1] is ComputeOutcome.DESTROYED
    driver.machines[KEY] = 2
    assert await leaving() == [False], "a newer one than its ended attempt"
    driver.machines[KEY] = 1
    destroys_before = driver.destroys
    again = await started(driver, service.records)
    await again.rest()
    assert driver.destroys == destroys_before, "nor is it destroyed with each start"


async def test_what_appears_after_its_destruction_is_destroyed_when_that_is_ordered_again() -> None:
    """Ironic carried out the request that takes a node seconds after its answer was given up."""
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0))
    await service.carry_out(destroy(0))
    driver.machines[KEY] = 1
    await service.carry_out(destroy(0))
    assert not driver.machines
    assert [result.outcome for result in service.results[1:]] == [ComputeOutcome.DESTROYED] * 2
