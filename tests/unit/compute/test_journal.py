"""The journal and what is remembered through it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.contracts.cell import ComputeOutcome, ComputeResult
from bus.faults import BrokenInvariant
from compute_sim import records as records_module
from compute_sim.config import ComputeConfig, HostSize
from compute_sim.domain.attempts import Entry, Phase, destroyed, failed, on_destroy, on_spawn
from compute_sim.fleet import Fleet, Guest
from compute_sim.journal import Journal, JournalInUse
from compute_sim.records import ForgetRow, Records

A = "host-a"


def rows(path: Path) -> list[ForgetRow]:
    journal = Journal(path, ForgetRow)
    found = journal.open()
    journal.close()
    return found


def test_a_torn_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    journal = Journal(path, ForgetRow)
    journal.open()
    journal.append([ForgetRow("a", "1"), ForgetRow("b", "2")])
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path, ForgetRow)
    assert journal.open() == [ForgetRow("a", "1")]
    journal.append([ForgetRow("c", "3")])
    journal.close()
    assert rows(path) == [ForgetRow("a", "1"), ForgetRow("c", "3")]


def test_damage_in_the_middle_stops_the_service(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    path.write_bytes(b'["f","a","1"]\n{nonsense}\n["f","b","2"]\n')
    journal = Journal(path, ForgetRow)
    with pytest.raises(BrokenInvariant):
        journal.open()
    journal.close()


def test_only_one_process_has_it(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "x.records", ForgetRow), Journal(tmp_path / "x.records", ForgetRow)
    first.open()
    with pytest.raises(JournalInUse):
        second.open()
    first.close()
    assert second.open() == []
    second.close()


def test_a_rewrite_replaces_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    journal = Journal(path, ForgetRow)
    journal.open()
    journal.append([ForgetRow("a", str(n)) for n in range(2500)])
    journal.rewrite(ForgetRow("b", str(n)) for n in range(1500))
    journal.append([ForgetRow("c", "1")])
    assert journal.rows == 1501
    journal.close()
    assert rows(path) == [*(ForgetRow("b", str(n)) for n in range(1500)), ForgetRow("c", "1")]


STEP = st.tuples(st.sampled_from(["spawn", "destroy", "fail", "clear", "told"]), st.integers(0, 3), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=60))
def test_what_is_read_back_is_what_was_known(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> None:  # fmt: skip  # noqa: E501
    path = tmp_path_factory.mktemp("r") / "s.records"
    records = Records(path)
    records.open()
    for what, number, attempt in steps:
        key = (A, str(number))
        entry = records.get(key)
        after: Entry | None = None
        if what == "spawn":
            after = on_spawn(entry, attempt)[1]
        elif what == "destroy":
            after = on_destroy(entry, attempt)[1]
        elif what == "fail":
            after = failed(entry, attempt, "x", "y")
        elif what == "clear":
            after = destroyed(entry)
        else:
            records.told([_result(key, attempt, outcome) for outcome in ComputeOutcome])
        if after is not None:
            records.put(key, after)
    records.close()
    again = Records(path)
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
    records = Records(tmp_path / "s.records")
    records.open()
    records.put((A, "keeps"), Entry(1, Phase.RUNNING))
    for number in range(200):
        records.put((A, str(number)), Entry(1, Phase.GONE, fence=1))
    known = dict(records.entries())
    assert len(known) == 11 and (A, "keeps") in known and (A, "199") in known and (A, "0") not in known
    records.close()
    assert len((tmp_path / "s.records").read_bytes().splitlines()) < 100
    again = Records(tmp_path / "s.records")
    again.open()
    assert dict(again.entries()) == known
    again.close()


def test_a_fleet_is_read_back_with_its_machines_and_operators_wishes(tmp_path: Path) -> None:
    config = ComputeConfig(hosts=3, state_dir=str(tmp_path))
    fleet = Fleet.planned(config, "c1", "s")
    fleet.open()
    first, second, _ = (host.plan.uuid for host in fleet.hosts)
    fleet.put(first, Guest("i1", 2, {first: {"VCPU": 1}}))
    fleet.put(first, Guest("i2", 1, {}, complete=False))
    fleet.put(second, Guest("i3", 1, {}))
    fleet.remove(second, "i3")
    fleet.disable(second, "fan")
    fleet.resize(first, HostSize(vcpus=3))
    fleet.close()
    again = Fleet.planned(config, "c1", "s")
    again.open()
    assert list(again.guests()) == list(fleet.guests()) and len(list(again.guests())) == 2
    host = again.host(second)
    assert host is not None and (host.enabled, host.disabled_reason) == (False, "fan")
    resized = again.host(first)
    assert resized is not None and resized.size.vcpus == 3
    again.close()
