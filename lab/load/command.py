"""`scripts/load`: many builds against a running system; `trace-settings`: settings with the hosts of a real cluster."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from berth.cli.common import Exit, Stop, Timeout, client, settings_of
from berth.cli.main import PLAIN
from berth.cli.options import CommandGroup
from berth.cli.output import err, out
from berth.cli.site.as_toml import as_toml
from berth.config.settings import Settings
from berth.config.site import Site, process_name
from bus.service.settings import hide_password
from lab.load import LoadPlan, LoadRun, PlanError
from lab.load.fleet import read_hosts, settings_like
from lab.load.live import render_record
from lab.load.plan import DEFAULT_BOOTS, MAX_BOOTS, Arrival, is_metal, parse_mix, parse_ramp, ramp_boots
from lab.load.record import LoadRecord, RecordError, decode, encode
from lab.load.report.compare import compare as compare_records
from lab.load.report.report import render as render_html
from lab.load.session import looking_on, recorded
from lab.load.trace import Shape, read_requests, read_trace
from scheduler_worker.config import Flavor

DEFAULT_MIX = "m1.tiny=40,m1.small=40,m1.medium=15,m1.large=5"
EXIT_INTERRUPTED = 130
STDOUT = Path("-")

app = CommandGroup(name="load", **PLAIN)


class LoadOptions(Struct, frozen=True, kw_only=True):
    """The options of `scripts/load`, each with its bounds and its help."""

    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file; else $BERTH_CONFIG, else ./berth.toml.")
    ] = None
    boots: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_BOOTS, help="How many builds; default 1000, or all of a ramp or trace."),
    ] = None
    mix: Annotated[
        str,
        typer.Option(help="Flavors and their weights, `small=8,large=2,metal=1`; metal: all bare-metal flavors."),
    ] = DEFAULT_MIX
    rate: Annotated[
        float,
        typer.Option(min=0, help="Open loop: boots per second, sent whatever the answers; latency from their times."),
    ] = 0.0
    ramp: Annotated[
        str | None, typer.Option(help="Open loop at a changing rate, FROM..TO/SECONDS; finds the knee.")
    ] = None
    concurrency: Annotated[int, typer.Option(min=0, help="Closed loop: this many in flight; 0 = all at once.")] = 0
    trace: Annotated[Path | None, typer.Option(help="Replay the arrivals and deletions of this CSV file.")] = None
    speed: Annotated[float, typer.Option(min=1e-6, max=1e9, help="A trace runs this many times faster.")] = 1.0
    deletes: Annotated[
        bool, typer.Option("--deletes/--no-deletes", help="A trace's deletions too; without them the fleet fills up.")
    ] = True
    skip: Annotated[
        float, typer.Option(min=0, help="Seconds of a trace to leave out; machines that exist then come at once.")
    ] = 0.0
    churn: Annotated[float, typer.Option(min=0, max=1, help="The share deleted once it is active.")] = 0.0
    retry_for: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds to offer refused requests again (full queue); default: open loop 0, else all."
        ),
    ] = None
    project: Annotated[str, typer.Option(help="The project that the instances are for.")] = "load"
    seed: Annotated[
        int | None, typer.Option(help="Draw flavors, and which are deleted, from this seed; uuids are new.")
    ] = None
    timeout: Timeout = 300.0
    bus: Annotated[str | None, typer.Option(help="The API bus, amqp://..., instead of the settings'.")] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record as JSON; - is stdout.")] = None
    report: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Fire nothing: compare two records that --json wrote.")
    ] = None


@app.default
async def load(context: typer.Context, *, options: LoadOptions) -> int:
    """Fire builds at a system and print what became of each.

    A build that was accepted and has not ended --timeout seconds later is late when a scheduler still has it under way,
    else lost. Exit status: 0 fine, 1 not one became active, or one ended twice, 3 the bus was
    unavailable, 4 builds or deletes were late or lost, 130 interrupted (Ctrl-C ends with a summary).
    """
    if options.compare is not None:
        if options.report is not None:
            raise typer.BadParameter("--compare prints text: no --report with it")
        return _compare(*options.compare)
    context.obj = options.config
    settings = settings_of(context, bus=options.bus)
    plan = _plan(settings, options)
    for path in (options.json_file, options.report):
        if path not in {None, STDOUT}:
            _writable(path)
    seed, trace = options.seed, str(options.trace or "")
    rng = random.Random(seed) if seed is not None else random.SystemRandom()
    record = await _fire(settings, plan, rng, seed=seed, trace=trace, speed=options.speed)
    _write_record(record, options.json_file, options.report)
    return _status(record)


async def _fire(settings: Settings, plan: LoadPlan, rng: random.Random, **more: object) -> LoadRecord:
    """Run the plan, showing how it goes; the first signal ends it with a summary, the second at once."""
    site = Site(settings)
    process = process_name("load")
    async with client(settings) as berth, looking_on(site, process) as transports:
        firing: list[LoadRun] = []
        task = asyncio.ensure_future(
            recorded(
                berth, plan, clock=berth.bus.clock, rng=rng, chance=random.SystemRandom(), transports=transports,
                started=firing.append, console=err, bus=hide_password(settings.bus.url), cells=site.cells, **more,
            )
        )  # fmt: skip

        def stop() -> None:
            if firing and not firing[0].interrupted:
                firing[0].interrupt()
            else:
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _plan(settings: Settings, options: LoadOptions) -> LoadPlan:
    """The plan that the options mean. Raises Stop."""
    named = {name: getattr(options, name) for name in ("rate", "ramp", "concurrency", "trace")}
    chosen = [f"--{name}" for name, given in named.items() if given]
    if len(chosen) > 1:
        raise Stop(Exit.USAGE, "load.mode", f"{' and '.join(chosen)}: arrivals come one way or the other")
    trace = options.trace
    if trace is not None and options.churn:
        raise Stop(Exit.USAGE, "load.churn", "a trace has its own deletions: no --churn with --trace")
    flavors = settings.scheduler.flavors
    try:
        from_s, to_s, ramp_s = parse_ramp(options.ramp) if options.ramp is not None else (0.0, options.rate, 0.0)
        arrivals: tuple[Arrival, ...] = ()
        if trace is not None:
            arrivals = read_trace(
                trace,
                _shapes(flavors),
                speed=options.speed,
                deletes=options.deletes,
                skip_s=options.skip,
                most=options.boots,
            )
        all_of_it = ramp_boots(from_s, to_s, ramp_s) if ramp_s else DEFAULT_BOOTS
        return LoadPlan(
            boots=len(arrivals) or options.boots or all_of_it,
            mix=parse_mix(options.mix, list(flavors)),
            project_id=options.project,
            concurrency=options.concurrency,
            rate_per_s=to_s,
            ramp_from_per_s=from_s,
            ramp_s=ramp_s,
            trace=arrivals,
            churn=options.churn,
            retry_for_s=options.retry_for,
            timeout_s=options.timeout,
        )
    except PlanError as fault:
        raise Stop(Exit.USAGE, fault.code, str(fault)) from fault


def _shapes(flavors: dict[str, Flavor]) -> dict[str, Shape]:
    """The size of each flavor of virtual machines; a trace requests no whole nodes."""
    return {
        name: Shape(flavor.vcpus, flavor.memory_mb, float(flavor.extra_specs.get("resources:VGPU", 0)))
        for name, flavor in flavors.items()
        if not is_metal(name)
    }


def _write_record(record: LoadRecord, json_file: Path | None, report: Path | None) -> None:
    """The end for a person, unless standard output is for a program; and the files that were requested."""
    if json_file == STDOUT:
        sys.stdout.write(encode(record).decode() + "\n")
    elif json_file is not None:
        _write(json_file, encode(record))
    if report is not None:
        _write(report, render_html(record).encode())
    if json_file != STDOUT:
        render_record(record, out)


def _status(record: LoadRecord) -> int:
    """The exit status that a run's end means; Stop with a message where there is one."""
    totals = record.totals
    bound = f"{record.settings.lost_after_s:g} s"
    if totals.duplicates:
        return Exit.NO
    for outcome, words in (("lost", "were lost: no end was received"), ("late", "were still under way")):
        boots, deletes = totals.outcomes.get(outcome, 0), totals.delete_outcomes.get(outcome, 0)
        if boots or deletes:
            text = f"{boots} builds and {deletes} deletes {words} after {bound}"
            raise Stop(Exit.TIME, f"load.{outcome}", text)
    if totals.interrupted:
        return EXIT_INTERRUPTED
    if totals.outcomes.get("unsent") or totals.delete_outcomes.get("unsent"):
        raise Stop(Exit.UNAVAILABLE, "bus.unavailable", "the bus was unavailable: some requests were never confirmed")
    if totals.boots and not totals.outcomes.get("active"):
        raise Stop(Exit.NO, "load.none_active", f"not one of {totals.boots} builds became active")
    return 0


def _compare(one: Path, two: Path) -> int:
    """Two records side by side."""
    sys.stdout.write(compare_records(_read(one), _read(two), names=(str(one), str(two))).text)
    return 0


def _read(path: Path) -> LoadRecord:
    try:
        return decode(path.read_bytes())
    except OSError as fault:
        raise Stop(Exit.USAGE, "record.unreadable", f"cannot read {path}: {fault.strerror or fault}") from fault
    except RecordError as fault:
        raise Stop(Exit.USAGE, fault.code, f"{path}: {fault}") from fault


def _writable(path: Path) -> None:
    """Find out before the load, not after it. Raises Stop."""
    try:
        path.open("ab").close()
    except OSError as fault:
        raise Stop(Exit.USAGE, "report.unwritable", f"cannot write {path}: {fault.strerror or fault}") from fault


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as fault:
        raise Stop(Exit.USAGE, "report.unwritable", f"cannot write {path}: {fault.strerror or fault}") from fault


SECTIONS = ("cells", "up", "compute", "scheduler")


@app.command("trace-settings")
async def trace_settings(
    hosts: Annotated[Path, typer.Argument(help="CSV of the hosts: cpu_milli, memory_mib, gpu, model.")],
    requests: Annotated[Path, typer.Argument(help="CSV of the requests, as for --trace.")],
) -> None:
    """Print settings with a real cluster's hosts and flavors.

    For --config of `berth` and `scripts/load`.
    """
    try:
        known, requested = read_hosts(hosts), read_requests(requests)
        settings = settings_like(known, requested)
    except PlanError as fault:
        raise Stop(Exit.USAGE, fault.code, str(fault)) from fault
    out.print(as_toml(differing(settings)), end="", markup=False, soft_wrap=True)
    err.print(
        f"{known.total():,} hosts of {len(known)} kinds, {len(requested):,} requests of "
        f"{len(settings.scheduler.flavors)} kinds",
        soft_wrap=True,
    )


def differing(settings: Settings) -> dict[str, object]:
    """The settings that are not default, as plain values."""
    usual, plain = msgspec.to_builtins(Settings()), msgspec.to_builtins(settings)
    found: dict[str, object] = {"cells": plain["cells"]}
    for section in SECTIONS[1:]:
        found[section] = {name: value for name, value in plain[section].items() if value != usual[section][name]}
    return found


def main() -> None:
    """Entry point of `scripts/load`."""
    app(prog_name="scripts/load")


if __name__ == "__main__":
    main()
