"""A load run for the eye: one HTML file that opens without a network.

Everything is drawn from the record's columns, so it shows no more than can be computed from the JSON beside it.
Names in a record come from outside (flavors, hosts, codes, queues): `charts` and `page` escape each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt

from lab.load.record import OUTCOMES, STAGES, Column, LoadRecord, Utilisation
from lab.load.report import charts, figures
from lab.load.report.charts import Range, Series
from lab.load.report.figures import LEAST_MS, PERCENTILES, Timeline, column, latencies_ms, stages_ms, summary
from lab.load.report.page import note, number, page, section, stack, table, tiles, truncate

MAX_BARS = 60
MAX_QUEUES = 7  # the busiest; the others are one line
MAX_KINDS = 40  # flavors or codes listed one by one
MAX_CODES = 3  # of one flavor
MAX_HEAT_ROWS = 72
MAX_HEAT_COLUMNS = 72
NOTHING = "-"
TIME = "time since the first intended arrival, s"

WHAT_STAGES_ARE = (
    "queued: until a scheduler took the request. decided: until it had chosen a host. claimed: until placement "
    "gave it, lost claims included. dispatched: until the host's compute service had the command. built: until a host "
    "reported that it runs, failed attempts included. announced: until the client got the event."
)


def render(record: LoadRecord) -> str:
    """The report of one run."""
    timeline = Timeline(record)
    title = f"Load on berth: {record.totals.boots:,} boots, {record.settings.mode}"
    return page(
        title,
        [
            note(_when(record)),
            _headline(record),
            section("Throughput", _throughput(record, timeline), _in_flight(record, timeline)),
            section("Latency", _distribution(record), _latency_over_time(record, timeline), _percentiles(record)),
            section("Time by stage", stack(_stage_means(record), _stage_table(record)), _stage_ranges(record)),
            section("Retries, conflicts and queues", _retries(record), _queues(record)),
            section("Hosts", _heat(record.utilisation), _fullness(record.utilisation)),
            section("How they ended", stack(_outcomes(record), _codes(record)), _by_flavor(record)),
            section("Settings and machine", _settings(record), _machine(record)),
        ],
    )


def _when(record: LoadRecord) -> str:
    try:
        began = datetime.fromtimestamp(record.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # a record from outside may contain anything
        began = "at an unknown time"
    broken = "; interrupted" if record.totals.interrupted else ""
    return f"Begun {began}; {number(record.seconds)} s; latency is counted from the intended time{broken}."


def _headline(record: LoadRecord) -> str:
    totals, latency = record.totals, summary(latencies_ms(record.boots))
    lost, late, active = (totals.outcomes.get(name, 0) for name in ("lost", "late", "active"))
    shown = [
        (number(totals.boots_per_s), "active boots a second", ""),
        (f"{active:,}", f"active of {totals.boots:,}", "good" if active == totals.boots else ""),
        (f"{number(latency['p50'])} ms" if latency else NOTHING, "median latency", ""),
        (f"{number(latency['p99'])} ms" if latency else NOTHING, "99th percentile", ""),
        (f"{lost:,}", "lost", "bad" if lost else "good"),
        *([(f"{late:,}", "still under way at the bound", "bad")] if late else []),
        (NOTHING if totals.conflicts is None else f"{totals.conflicts:,}", "claims lost to others", ""),
        (f"{totals.backpressure:,}", "refusals by backpressure", ""),
    ]
    if totals.duplicates:
        shown.append((f"{totals.duplicates:,}", "ended twice: a defect", "bad"))
    if totals.deletes:
        shown.append((f"{totals.delete_outcomes.get('deleted', 0):,}", f"deleted of {totals.deletes:,}", ""))
    return tiles(shown)


def _throughput(record: LoadRecord, timeline: Timeline) -> str:
    boots, deletes = record.boots, record.deletes
    if not len(boots):
        return note("Nothing was sent.")
    ended = column(boots.ended_s)
    series = [
        Series("meant to leave", timeline.rate(column(boots.intended_s))),
        Series("confirmed by the broker", timeline.rate(column(boots.sent_s))),
        Series("active", timeline.rate(ended[figures.having(boots, "active")])),
    ]
    others = ended[~figures.having(boots, "active")]
    if np.isfinite(others).any():
        series.append(Series("failed or refused", timeline.rate(others)))
    if len(deletes):
        series.append(Series("deleted", timeline.rate(column(deletes.ended_s))))
    title = f"Throughput, in pieces of {number(timeline.step)} s"
    return charts.lines(title, timeline.middles, series, x_label=TIME, y_label="a second")


def _in_flight(record: LoadRecord, timeline: Timeline) -> str:
    if not len(record.boots):
        return ""
    sent, ended = column(record.boots.sent_s), column(record.boots.ended_s)
    known = np.isfinite(sent)
    series = [Series("in flight", timeline.in_flight(sent[known], ended[known]))]
    ends = timeline.edges[1:].tolist()
    return charts.lines("Sent and not ended", ends, series, x_label=TIME, y_label="boots")


def _distribution(record: LoadRecord) -> str:
    values = np.maximum(latencies_ms(record.boots), LEAST_MS)
    if not values.size:
        return note("No boot became active, so there is no latency to show.")
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low * 0.999, max(high * 1.001, low * 1.5), min(MAX_BARS, 4 + values.size) + 1)
    counts, _ = np.histogram(values, bins=edges)
    found = summary(values)
    marks = {name: found[name] for name in ("p50", "p90", "p99", "max")}
    title = f"Latency of {values.size:,} active boots"
    return charts.bars(title, edges.tolist(), counts.tolist(), marks, x_label="latency, ms (logarithmic)")


def _latency_over_time(record: LoadRecord, timeline: Timeline) -> str:
    boots = record.boots
    active = figures.having(boots, "active")
    ended = column(boots.ended_s)[active]
    values = 1000 * (ended - column(boots.intended_s)[active])
    if not np.isfinite(values).any():
        return ""
    series = [
        Series(name, timeline.quantiles(ended, values, share))
        for name, share in PERCENTILES.items()
        if name in {"p50", "p95", "p99"}
    ]
    return charts.lines(
        "Latency of requests that ended then", timeline.middles, series, x_label=TIME, y_label="latency, milliseconds"
    )


def _percentiles(record: LoadRecord) -> str:
    boots = record.boots
    rows = [("all active boots", latencies_ms(boots))]
    active, latency = figures.having(boots, "active"), column(boots.ended_s) - column(boots.intended_s)
    flavors = np.array(boots.flavor, dtype=np.int64)
    for index, name in enumerate(boots.flavors[:MAX_KINDS]):
        of_flavor = 1000 * latency[active & (flavors == index)]
        rows.append((f"{name} ({boots.kinds[index]})", of_flavor[np.isfinite(of_flavor)]))
    if len(record.deletes):
        rows.append(("deletes", latencies_ms(record.deletes, "deleted")))
    return _summaries("Latency, ms", [row for row in rows if row[1].size])


def _summaries(title: str, rows: list[tuple[str, figures.Array]]) -> str:
    if not rows:
        return ""
    columns = [*PERCENTILES, "max", "mean"]
    lines = [(name, summary(values), values.size) for name, values in rows]
    return table(
        [title, "count", *columns],
        [[truncate(name), f"{size:,}", *(number(found[key]) for key in columns)] for name, found, size in lines],
        caption="Percentiles by nearest rank.",
    )


def _stage_means(record: LoadRecord) -> str:
    found = stages_ms(record.boots)
    if not found:
        return note("No boot has the times of its stages.") if len(record.boots) else ""
    return charts.shares("Mean time in each stage", [(n, float(v.mean())) for n, v in found.items()], unit="ms")


def _stage_ranges(record: LoadRecord) -> str:
    rows = []
    for name, values in stages_ms(record.boots).items():
        five = np.maximum(np.quantile(values, (0.01, 0.25, 0.5, 0.75, 0.99)), LEAST_MS / 10).tolist()
        text = ", ".join(f"{p} {number(v)}" for p, v in zip(("p1", "p25", "p50", "p75", "p99"), five, strict=True))
        rows.append(Range(name, (five[0], five[1], five[2], five[3], five[4]), f"{name}: {text} ms"))
    title = "Time in each stage: p1 to p99 thin, p25 to p75 thick, median dot"
    if not rows:
        return ""
    return stack(charts.ranges(title, rows, x_label="milliseconds (logarithmic)"), note(WHAT_STAGES_ARE))


def _stage_table(record: LoadRecord) -> str:
    return _summaries("Stage, ms", list(stages_ms(record.boots).items()))


def _retries(record: LoadRecord) -> str:
    samples = record.samples
    counters: dict[str, Sequence[int | None]] = {
        "claims lost to others": samples.conflicts,
        "builds tried on another host": samples.retries,
        "refused by backpressure": samples.backpressure,
    }
    rates = {name: figures.per_second(samples.at_s, values) for name, values in counters.items()}
    rates = {name: values for name, values in rates.items() if any(values)}
    if not rates:
        return note("No retries and no conflicts were reported.")
    at, shown = figures.thinned(samples.at_s, rates)
    series = [Series(name, values) for name, values in shown.items()]
    return charts.lines("Retries and conflicts", at, series, x_label=TIME, y_label="a second")


def _queues(record: LoadRecord) -> str:
    samples = record.samples
    depths: dict[str, Column] = {name: list(values) for name, values in samples.depths.items()}
    peaks = {name: max((v for v in values if v is not None), default=0) for name, values in depths.items()}
    busiest = sorted(peaks, key=lambda name: (-peaks[name], name))
    if not depths or not len(samples):
        return note("Queue depths were not observed.")
    if not any(peaks.values()):
        return note(f"Nothing waited in any of {len(depths)} queues whenever they were looked at.")
    shown = {name: depths[name] for name in busiest[:MAX_QUEUES]}
    if others := busiest[MAX_QUEUES:]:
        columns = zip(*(depths[name] for name in others), strict=True)
        shown[f"{len(others)} others together"] = [sum(v or 0 for v in row) for row in columns]
    at, high = figures.thinned(samples.at_s, shown)
    series = [Series(name, values) for name, values in high.items()]
    looks = "at each look" if len(at) == len(samples) else "the most of a few looks"
    title = f"Messages waiting in queues, {looks}"
    return charts.lines(title, at, series, x_label=TIME, y_label="messages (many items each)", joined=False)


def _heat(heat: Utilisation) -> str:
    if not heat.hosts or not heat.at_s:
        return note("The hosts' utilisation was not observed.")
    rows = _rows_of(heat)
    moments = np.unique(np.linspace(0, len(heat.at_s) - 1, MAX_HEAT_COLUMNS).astype(int))
    share = np.nan_to_num(np.array([heat.share[at] for at in moments], dtype=np.float64))
    at = [heat.at_s[moment] for moment in moments]
    names, cells, before = [], [], ""
    for members in rows:
        first, last = int(members[0]), int(members[-1])
        cell = heat.cells[first]
        names.append(cell if cell != before else "")
        before = cell
        hosts = truncate(heat.hosts[first]) + (
            f" to {truncate(heat.hosts[last])} ({len(members)} hosts)" if first != last else ""
        )
        moment_by_moment = zip(at, share[:, members], strict=True)
        cells.append([(float(part.mean()), _heat_note(cell, hosts, t, part)) for t, part in moment_by_moment])
    kept = f"{len(heat.hosts):,} of {heat.of_hosts:,} hosts" if heat.of_hosts > len(heat.hosts) else "every host"
    title = f"How full the hosts are ({kept}; the fullest of a host's resources)"
    return charts.heat(title, at, names, cells, x_label=TIME)


def _rows_of(heat: Utilisation) -> list[npt.NDArray[np.int64]]:
    """Which hosts share a row: neighbours by name, of one cell (unless there are more cells than rows)."""
    cells: dict[str, list[int]] = {}
    few = len(set(heat.cells)) <= MAX_HEAT_ROWS // 2
    for at in sorted(range(len(heat.hosts)), key=lambda at: (heat.cells[at], heat.hosts[at])):
        cells.setdefault(heat.cells[at] if few else "", []).append(at)
    room = MAX_HEAT_ROWS - len(cells)
    pieces = {cell: min(len(hosts), 1 + room * len(hosts) // len(heat.hosts)) for cell, hosts in cells.items()}
    return [row for cell, hosts in cells.items() for row in np.array_split(np.array(hosts), pieces[cell])]


def _heat_note(cell: str, hosts: str, at: float, part: figures.Array) -> str:
    spread = f", {part.min():.0%} to {part.max():.0%}" if part.size > 1 else ""
    return f"{truncate(cell)}: {hosts}\nat {number(at)} s: {part.mean():.0%} used{spread}"


def _fullness(heat: Utilisation) -> str:
    if not heat.hosts or not heat.at_s:
        return ""
    cells: dict[str, list[float]] = {}
    for cell, share in zip(heat.cells, heat.share[-1], strict=True):
        cells.setdefault(cell, []).append(share)
    rows = [("all", heat.share[-1]), *sorted(cells.items())[:MAX_KINDS]]
    return table(
        ["cell", "hosts", "least", "p50", "mean", "fullest"],
        [
            [truncate(name), f"{len(s):,}", *(f"{f(s):.1%}" for f in (min, np.median, np.mean, max))]
            for name, s in (rows if len(cells) > 1 else rows[1:])
        ],
        caption="How full hosts are at the end: used over capacity of the fullest resource.",
    )


def _outcomes(record: LoadRecord) -> str:
    totals = record.totals
    rows = [("boot", name, count, totals.boots) for name, count in totals.outcomes.items() if count]
    rows += [("delete", name, count, totals.deletes) for name, count in totals.delete_outcomes.items() if count]
    return table(
        ["requested", "ended", "count", "share"],
        [[kind, truncate(name), f"{count:,}", f"{count / max(whole, 1):.2%}"] for kind, name, count, whole in rows],
        words=2,
    )


def _codes(record: LoadRecord) -> str:
    totals = record.totals
    counts = Counter({("boot", code): count for code, count in totals.by_code.items()})
    counts.update({("delete", code): count for code, count in totals.delete_by_code.items()})
    if not counts:
        return note("Nothing failed and nothing was refused.")
    rows = [[kind, truncate(code) or NOTHING, f"{count:,}"] for (kind, code), count in counts.most_common(MAX_KINDS)]
    if len(counts) > MAX_KINDS:
        rows.append(["", f"and {len(counts) - MAX_KINDS} other codes", ""])
    return table(["requested", "code", "count"], rows, words=2)


def _by_flavor(record: LoadRecord) -> str:
    """How the boots of each flavor ended, and the most frequent codes of those that did not become active."""
    boots = record.boots
    ends: dict[int, Counter[str]] = {}
    codes: dict[int, Counter[str]] = {}
    for flavor, outcome, code in zip(boots.flavor, boots.outcome, boots.code, strict=True):
        ends.setdefault(flavor, Counter())[OUTCOMES[outcome]] += 1
        if boots.codes[code] and OUTCOMES[outcome] != "active":
            codes.setdefault(flavor, Counter())[boots.codes[code]] += 1
    if not ends:
        return ""
    others = [name for name in OUTCOMES if name != "active" and any(found[name] for found in ends.values())]
    rows = [
        [
            truncate(boots.flavors[flavor]),
            ", ".join(
                f"{count:,} {truncate(code)}" for code, count in codes.get(flavor, Counter()).most_common(MAX_CODES)
            ),
            f"{found.total():,}",
            *(f"{found[name]:,}" for name in ("active", *others)),
            f"{1 - found['active'] / found.total():.1%}",
        ]
        for flavor, found in sorted(ends.items(), key=lambda item: -(item[1].total() - item[1]["active"]))[:MAX_KINDS]
    ]
    return table(["flavor", "codes", "requested", "active", *others, "not active"], rows, words=2)


def facts(value: msgspec.Struct) -> dict[str, str]:
    """Settings or a machine as names and words; what was not set is left out."""
    found: dict[str, str] = {}
    for name, one in msgspec.to_builtins(value).items():
        if isinstance(one, dict):
            found[name] = ", ".join(f"{truncate(str(k))}: {v:g}" for k, v in list(one.items())[:MAX_KINDS])
        elif isinstance(one, list | tuple):
            found[name] = ", ".join(truncate(str(part)) for part in one[:MAX_KINDS])
        else:
            found[name] = number(one) if isinstance(one, float) else truncate(str(one))
    return found


def _settings(record: LoadRecord) -> str:
    return table(["setting", "value"], [[name, value] for name, value in facts(record.settings).items()], words=2)


def _machine(record: LoadRecord) -> str:
    rows = [[name, value] for name, value in facts(record.machine).items()]
    if record.totals.knee:
        rows += [[f"knee: {truncate(name)}", number(value)] for name, value in record.totals.knee.items()]
    recorded = [stage for stage in STAGES if stage in record.boots.stages]
    rows += [["stages reported", ", ".join(recorded) or "none"], ["record", record.format]]
    return table(["machine of the load generator", ""], rows, words=2)
