"""The results of a chaos run that count as a bug, and that a person can read the report."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from lab.chaos.faults import Death
from lab.chaos.report import ChaosReport, Stall, render

SOUND = ChaosReport(
    seed=1, seconds=10.0, requests=100, wanted=100, stopped="", deletes=10, active=90, failed=0, refused=0,
    deleted=10, failures_by_code={}, failure_reasons={}, events=400, events_repeated=1, lost=0, doubled=0, leaked=0,
    overcommitted=0,
    faults={"kill_broker": 1}, faults_total=1, connections_cut=0, died=(), ends_per_s=11.0, longest_stall_s=3.2,
    longest_stall=Stall(3.2, ("kill_broker",)), recovery_s=1.5, recovery_by_kind={"kill_broker": (2.5, 2.5)},
    at_rest=True, dead_letters={}, invariants={"capacity": True}, verdicts=(), examples={}, ends_every_ten_s=(110,),
)  # fmt: skip


def test_a_run_is_sound_when_nothing_is_wrong() -> None:
    assert SOUND.sound


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"doubled": 1},
        {"leaked": 1},
        {"overcommitted": 1},
        {"at_rest": False},
        {"wanted": 101},
        {"moves_wanted": 1},
        {"invariants": {"x": False}},
    ],
)
def test_a_run_is_not_sound_when_anything_is(wrong: dict[str, object]) -> None:
    assert not msgspec.structs.replace(SOUND, **wrong).sound


@pytest.mark.parametrize(
    ("status", "words", "bug"),
    [
        (1, '{"code":"KeyError","event":"process.died"}', True),
        (1, '{"code":"bus.unavailable","event":"process.died"}', False),
        (70, '{"code":"state.illegal","event":"process.invariant_broken"}', True),
        (137, "", False),
    ],
)
def test_a_death_is_a_bug_unless_an_outage_explains_it(status: int, words: str, bug: bool) -> None:
    report = msgspec.structs.replace(SOUND, died=(Death("scheduler1", status, words, 1.0),))
    assert (bool(report.bugs), report.sound) == (bug, not bug)


def test_a_person_reads_every_figure() -> None:
    output = io.StringIO()
    report = msgspec.structs.replace(
        SOUND, lost=7, examples={"lost": ("some-uuid",)}, wanted=200, stopped="after 3600 s"
    )
    render(report, Console(file=output, width=100))
    text = output.getvalue()
    assert "only 100 of 200 builds were requested: after 3600 s" in text
    for words in ("kill broker", "2.50 s", "longest stall: 3.2 s (kill_broker)", "1.5 s after", "lost: some-uuid"):
        assert words in text
