"""The record of a load run, its report, and two of them side by side: runs that never were, drawn from a seed."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from lab.load.record import (
    FORMAT,
    OUTCOMES,
    STAGES,
    LoadRecord,
    LoadSettings,
    MachineInfo,
    Operations,
    RecordError,
    Samples,
    Totals,
    Utilisation,
    decode,
    encode,
)
from lab.load.report import figures
from lab.load.report.compare import Comparison, Line, compare, interval
from lab.load.report.page import number
from lab.load.report.report import MAX_HEAT_COLUMNS, MAX_HEAT_ROWS, render

# --- Records of load runs that never were: any number of boots, drawn from a seed.


ACTIVE, FAILED, LOST = (OUTCOMES.index(name) for name in ("active", "failed", "lost"))
SHARES = (0.25, 0.05, 0.1, 0.2, 0.1, 0.3)


def made_up(boots: int, *, seed: int = 1, hosts: int = 40, slower: float = 1.0, name: str = "m1.small") -> LoadRecord:
    """A run at about 1,000 boots a second; one boot in fifty fails, none is lost. `name`: what everything is called."""
    rng = np.random.default_rng(seed)
    intended = np.arange(boots) / 1000
    latency = slower * (0.02 + rng.gamma(2.0, 0.02, boots))
    stages = {s: (latency * share).round(6).tolist() for s, share in zip(STAGES, SHARES, strict=True)}
    outcome = np.where(np.arange(boots) % 50 == 49, FAILED, ACTIVE)
    failed = int((outcome == FAILED).sum())
    rows = Operations(
        flavors=[name, f"{name}.metal"],
        kinds=["vm", "metal"],
        codes=["", f"{name}.code"],
        cells=["", f"{name}-cell1", f"{name}-cell2"],
        hosts=["", f"{name}-host"],
        instance_uuid=[f"00000000-0000-4000-8000-{number:012d}" for number in range(boots)],
        intended_s=intended.tolist(),
        sent_s=(intended + 0.001).tolist(),
        accepted_s=(intended + 0.005).tolist(),
        ended_s=(intended + latency).tolist(),
        outcome=outcome.tolist(),
        flavor=(np.arange(boots) % 10 == 0).astype(int).tolist(),
        code=(outcome == FAILED).astype(int).tolist(),
        cell=[1] * boots,
        host=[1] * boots,
        attempts=[1] * boots,
        conflicts=[None] * boots,
        again=[0] * boots,
        stages=stages,
    )
    seconds = boots / 1000 + 0.1 if boots else 0.0
    return LoadRecord(
        settings=LoadSettings(mode="open", boots=boots, mix={name: 9.0, f"{name}.metal": 1.0}, rate_per_s=1000.0),
        totals=Totals(
            boots=boots,
            accepted=boots,
            outcomes={"active": boots - failed, "failed": failed},
            by_code={f"{name}.code": failed} if failed else {},
            seconds=seconds,
            boots_per_s=(boots - failed) / seconds if seconds else 0.0,
            conflicts=3 * boots // 100,
        ),
        started_at=1_800_000_000.0,
        seconds=seconds,
        machine=MachineInfo(hostname=name, cpus=2, python="3.11.2"),
        boots=rows,
        samples=_samples(boots, seconds, name, rng) if boots else Samples(),
        utilisation=_heat(hosts, seconds, name, rng) if boots else Utilisation(),
    )


def _samples(boots: int, seconds: float, name: str, rng: np.random.Generator) -> Samples:
    at = np.arange(0.0, seconds + 0.5, 0.5)
    share = np.minimum(at / seconds, 1.0)
    size = len(at)
    return Samples(
        at_s=at.tolist(),
        offered_per_s=[1000.0] * size,
        sent_per_s=[1000.0] * size,
        ended_per_s=[1000.0] * size,
        deleted_per_s=[0.0] * size,
        in_flight=[60] * size,
        p50_ms=[50.0] * size,
        p95_ms=[90.0] * size,
        p99_ms=[None] * size,
        conflicts=(share * 0.03 * boots).astype(int).tolist(),
        retries=(share * 0.01 * boots).astype(int).tolist(),
        backpressure=[0] * size,
        depths={f"{name}.queue{number}": rng.integers(0, 10 + 30 * number, size).tolist() for number in range(12)},
    )


def _heat(hosts: int, seconds: float, name: str, rng: np.random.Generator) -> Utilisation:
    at = np.linspace(0.0, seconds, 12)
    most = rng.uniform(0.3, 1.0, hosts)
    return Utilisation(
        hosts=[f"{name}-host{number:05d}" for number in range(hosts)],
        cells=[f"{name}-cell{1 + number % 2}" for number in range(hosts)],
        of_hosts=hosts,
        at_s=at.tolist(),
        share=[(most * moment / max(seconds, 1e-9)).round(3).tolist() for moment in at],
    )


# --- a load report: one file that holds everything, whatever names the record came with, and nothing of its own


HOSTILE = "<script>alert(1)</script>\"'>&<img src=x onerror=alert(1)>"
VOID = {"meta", "br", "img"}
MOST_BYTES = 2_000_000


class Page(HTMLParser):
    """Every tag that was opened and closed, and what could leave the page or run on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.reaching_out: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.reaching_out += [
            f"{tag} {n}" for n, _ in attrs if n.startswith("on") or n in {"src", "href", "xlink:href"}
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def read(record: LoadRecord) -> Page:
    text = render(record)
    assert len(text) < MOST_BYTES
    assert not re.search(r"url\(|@import|https?:", text), "it requests something that is not in the file"
    page = Page(text)
    assert page.open == [] and page.reaching_out == []
    assert "script" not in page.seen and "nan" not in page.text.lower().split()
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg.replace("information", "")
    return page


@pytest.mark.parametrize("boots", [0, 1, 2, 20_000])
def test_a_report_of_any_size_is_a_whole_page(boots: int) -> None:
    page = read(made_up(boots, hosts=2_000 if boots > 2 else boots))
    assert f"Load on berth: {boots:,} boots, open" in page.text
    assert page.seen.count("svg") == {0: 0, 20_000: 9}.get(boots, 8), "and no empty plot"
    for name in ("Throughput", "Latency", "Settings and machine", "How they ended"):
        assert name in page.text


def test_names_from_outside_are_only_ever_text() -> None:
    record = made_up(2_000, name=HOSTILE)
    record = replace(
        record,
        settings=replace(record.settings, trace=HOSTILE, bus=HOSTILE, project_id=HOSTILE, cells=(HOSTILE,)),
        totals=replace(record.totals, outcomes={HOSTILE: 5}, delete_by_code={HOSTILE: 1}, knee={HOSTILE: 1.0}),
    )
    page = read(record)
    assert "<script>alert(1)" in page.text and "img" not in page.seen


def test_cells_of_the_heat_map_are_bounded_and_no_row_mixes_cells() -> None:
    hosts, moments = 2_000, 240
    heat = Utilisation(
        hosts=[f"h{number:05d}" for number in range(hosts)],
        cells=[f"cell{number * 7 // hosts}" for number in range(hosts)],
        of_hosts=10_000,
        at_s=[float(moment) for moment in range(moments)],
        share=[[0.5] * hosts for _ in range(moments)],
    )
    text = render(replace(made_up(1), utilisation=heat))
    notes = re.findall(r'class="heat".*?<title>(.*?)</title>', text, re.DOTALL)
    assert len(notes) <= MAX_HEAT_ROWS * MAX_HEAT_COLUMNS
    assert len({note.split(":")[0] for note in notes}) == 7
    labelled = {tuple(re.findall(r"h(\d{5})", note)) for note in notes}
    assert all(int(first) * 7 // hosts == int(last) * 7 // hosts for first, last in labelled)
    assert "2,000 of 10,000 hosts" in text


@pytest.mark.parametrize(("boots", "seconds", "step"), [(600, 7.5, 0.5), (100_000, 60.0, 1.0), (3, 9.0, 0.5)])
def test_a_point_of_a_plot_stands_for_enough_boots(boots: int, seconds: float, step: float) -> None:
    """Six boots to a point is a saw, not a throughput."""
    record = made_up(boots)
    ended = [seconds * (number + 1) / boots for number in range(boots)]
    rows = replace(record.boots, intended_s=ended, ended_s=ended)
    assert figures.Timeline(replace(record, boots=rows, deletes=Operations())).step == step


def test_what_is_unknown_or_absurd_makes_no_broken_plot() -> None:
    record = made_up(3)
    rows = replace(
        record.boots,
        ended_s=[None, 1e300, -5.0],
        sent_s=[math.inf, None, 0.0],
        stages={"built": [None, 1e308, 0.0], "queued": [None] * 3},
    )
    read(replace(record, boots=rows, started_at=1e300, totals=replace(record.totals, boots_per_s=math.nan)))
    unknown = replace(record.boots, ended_s=[None] * 3, sent_s=[None] * 3, stages={})
    page = read(replace(record, boots=unknown))
    assert "No boot became active" in page.text and "No boot has the times" in page.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1,234"),
        (12.345, "12.3"),
        (0.5, "0.5"),
        (0.00125, "0.00125"),
        (3e12, "3e+12"),
        (100.0, "100"),
    ],
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text


# --- two runs side by side: what differs, and that no more is claimed than two runs can show


def line(found: Comparison, what: str) -> Line:
    (one,) = (line for line in found.lines if line.what == what)
    return one


def test_a_run_that_is_slower_is_called_slower_and_the_faster_one_faster() -> None:
    calm, slow = made_up(2_000, seed=1), made_up(2_000, seed=2, slower=1.3)
    found = compare(calm, slow, names=("calm", "slow"))
    for what in ("latency p50, ms", "latency p99, ms", "queued p50, ms", "announced p99, ms"):
        one = line(found, what)
        assert one.meaning == "slower" and one.interval is not None and one.ratio is not None
        assert 1 < one.interval[0] < one.ratio < one.interval[1], what
        assert one.interval[0] < 1.3 < one.interval[1], what
    assert line(compare(slow, calm), "latency p50, ms").meaning == "faster"
    assert found.conclusions[0] == "Settings and machine are the same."
    assert found.conclusions[1].startswith("Latency p50: slow is slower, 1.3")


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_the_same_system_twice_is_rarely_distinguished(share: float) -> None:
    """At 95 per cent one pair in twenty is, by bad luck; a method that claims too much distinguishes far more."""
    rng = np.random.default_rng(1)
    found = [interval(rng.gamma(2.0, 0.02, 600), rng.gamma(2.0, 0.02, 600), share, rng) for _ in range(60)]
    apart = [pair for pair in found if pair is not None and not pair[0] <= 1 <= pair[1]]
    assert None not in found and len(apart) <= 6


def test_boots_that_wait_in_one_queue_are_not_counted_as_many_witnesses() -> None:
    """Latency that wanders slowly: neighbours are alike, so the interval is far wider than shuffled boots claim."""
    rng = np.random.default_rng(4)
    wander = np.exp(0.5 * np.sin(np.arange(10_000) / 400) + rng.normal(0, 0.02, 10_000))
    other = np.exp(0.5 * np.sin(np.arange(10_000) / 400 + 1) + rng.normal(0, 0.02, 10_000))
    honest = interval(wander, other, 0.5, np.random.default_rng(1))
    shuffled = interval(rng.permutation(wander), rng.permutation(other), 0.5, np.random.default_rng(1))
    assert honest is not None and shuffled is not None
    assert honest[1] - honest[0] > 3 * (shuffled[1] - shuffled[0])


def test_few_boots_prove_nothing() -> None:
    found = compare(made_up(99), made_up(99, slower=3.0))
    assert (
        line(found, "latency p50, ms").meaning == line(found, "latency p99, ms").meaning == "too few boots to compare"
    )
    found = compare(made_up(300), made_up(300, slower=3.0))
    assert line(found, "latency p50, ms").meaning == "slower"
    assert line(found, "latency p99, ms").meaning == "too few boots to compare", "three boots beyond it"
    empty = compare(made_up(0), made_up(0))
    assert line(empty, "latency p50, ms").ratio is None and "not known" in empty.text


@pytest.mark.parametrize("boots", [0, 1, 3_000])
def test_a_comparison_is_whole_and_names_are_only_text(boots: int) -> None:
    record = made_up(boots, name=HOSTILE)
    record = replace(record, totals=replace(record.totals, outcomes={HOSTILE + "\x1b[31m": 5}))
    found = compare(record, made_up(boots), names=(HOSTILE, "b\x1b[2J"))
    assert "\x1b" not in found.text
    widths = [len(row) for row in found.text.splitlines() if "ms  " in row]
    assert widths


# --- the record of a load run: written, read again, and refused when it is not one


def a_record() -> LoadRecord:
    boots = Operations(
        flavors=["m1.tiny"], kinds=["vm"], codes=["", "no_hosts"], cells=["", "cell1"], hosts=["", "h1"],
        instance_uuid=["a", "b"], intended_s=[0.0, 0.1], sent_s=[0.01, None], accepted_s=[0.02, None],
        ended_s=[0.5, None], outcome=[0, 5], flavor=[0, 0], code=[0, 1], cell=[1, 0], host=[1, 0], attempts=[1, 0],
        conflicts=[0, None], again=[0, 3], stages={"queued": [0.1, None]},
    )  # fmt: skip
    samples = Samples(
        at_s=[0.5], offered_per_s=[4.0], sent_per_s=[2.0], ended_per_s=[2.0], deleted_per_s=[0.0], in_flight=[0],
        p50_ms=[500.0], p95_ms=[500.0], p99_ms=[None], conflicts=[None], retries=[0], backpressure=[3],
        depths={"scheduler.requests": [7]},
    )  # fmt: skip
    heat = Utilisation(hosts=["h1"], cells=["cell1"], of_hosts=1, at_s=[0.5], share=[[0.25]])
    settings = LoadSettings(mode="open", boots=2, rate_per_s=10.0)
    return LoadRecord(settings=settings, totals=Totals(boots=2), boots=boots, samples=samples, utilisation=heat)


def test_a_record_is_read_as_it_was_written() -> None:
    record = a_record()
    assert decode(encode(record)) == record
    assert record.boots.latency_s(0) == 0.5 and record.boots.latency_s(1) is None
    assert [record.boots.outcome_of(row) for row in range(2)] == ["active", "unsent"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "record.unreadable"),
        (b"[" * 100_000, "record.unreadable"),
        (b"{}", "record.unreadable"),
        (encode(replace(a_record(), format="lab.load.v9")), "record.format"),
        (encode(a_record()).replace(b'"outcome":[0,5]', b'"outcome":[0,99]'), "record.invalid"),
        (encode(a_record()).replace(b'"outcome":[0,5]', b'"outcome":[0]'), "record.invalid"),
        (encode(a_record()).replace(b'"queued":[0.1,null]', b'"queued":[0.1]'), "record.invalid"),
        (encode(a_record()).replace(b'"scheduler.requests":[7]', b'"scheduler.requests":[]'), "record.invalid"),
        (encode(a_record()).replace(b'"share":[[0.25]]', b'"share":[[]]'), "record.invalid"),
        (encode(a_record()).replace(b'"share":[[0.25]]', b'"share":[]'), "record.invalid"),
    ],
)
def test_what_is_not_a_record_is_refused_with_a_code(body: bytes, code: str) -> None:
    with pytest.raises(RecordError) as fault:
        decode(body)
    assert fault.value.code == code


def test_a_field_of_a_newer_record_is_passed_over() -> None:
    plain = msgspec.json.decode(encode(a_record()))
    assert decode(msgspec.json.encode({**plain, "weather": "fine"})).format == FORMAT
