"""`berth load` and `berth check`: many builds against a running system, and the invariants judged from outside."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from berth.commands.common import (
    EXIT_AWAY,
    EXIT_NO,
    EXIT_TIME,
    EXIT_USAGE,
    AsJson,
    Stop,
    Timeout,
    client,
    database_of,
    err,
    out,
    print_json,
    run,
    settings_of,
)
from berth.gather import gather, rest
from berth.invariants import judge
from berth.load import LoadPlan, run_load
from berth.render import render_load, render_verdicts

# Past the wait for rest: reading the databases and hearing every compute service.
CHECK_TIMEOUT_S = 60.0
DEFAULT_MIX = "m1.tiny=40,m1.small=40,m1.medium=15,m1.large=5"


def load(
    context: typer.Context,
    boots: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many builds.")] = 1000,
    mix: Annotated[str, typer.Option(help="Flavors and their weights, `name=weight,...`.")] = DEFAULT_MIX,
    concurrency: Annotated[int, typer.Option(min=0, help="Builds in flight at once; 0 = all at once.")] = 0,
    rate: Annotated[float, typer.Option(min=0, help="Builds a second, whatever comes back; 0 = off.")] = 0.0,
    project: Annotated[str, typer.Option(help="Whose they are.")] = "load",
    seed: Annotated[int | None, typer.Option(help="Draw flavors and UUIDs from this seed.")] = None,
    timeout: Timeout = 300.0,
    report: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fire concurrent builds at a running system. Exit status 1 when one was lost or told to have ended twice."""
    plan = LoadPlan(
        boots=boots, mix=parse_mix(mix), project_id=project, concurrency=concurrency, rate_per_s=rate, timeout_s=timeout
    )
    rng = random.Random(seed) if seed is not None else random.SystemRandom()

    async def body() -> int:
        bar = Progress(
            SpinnerColumn(), TextColumn("booting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
        )
        async with client(settings_of(context)) as berth:
            with bar:
                task = bar.add_task("", total=boots)
                result = await run_load(
                    berth, plan, clock=berth.bus.clock, rng=rng,
                    progress=lambda done, asked: bar.update(task, completed=done, total=asked),
                )  # fmt: skip
        if report is not None:
            _write(report, msgspec.json.format(msgspec.json.encode(result), indent=2))
        if as_json:
            print_json(result)
        else:
            render_load(result, out)
        if result.unfinished:
            raise Stop(EXIT_TIME, "timeout", f"{result.unfinished} builds had not ended after {timeout:g} s")
        return EXIT_NO if result.more_than_one_terminal else 0

    run(body)


def check(
    context: typer.Context,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Seconds to wait for rest first.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Judge the invariants of a running system from the outside. Exit status 1 when one is broken."""

    async def body() -> int:
        site = database_of(settings_of(context))
        try:
            async with asyncio.timeout(wait + CHECK_TIMEOUT_S):
                at_rest = await rest(site, timeout_s=wait)
                verdicts = judge(await gather(site))
        except TimeoutError as fault:
            raise Stop(EXIT_AWAY, "check.unanswered", "bus or database did not answer in time") from fault
        if as_json:
            print_json({"at_rest": at_rest, "invariants": verdicts})
        else:
            if not at_rest:
                err.print(
                    "[yellow]the system is not at rest; what is under way counts as a breach[/yellow]", soft_wrap=True
                )
            render_verdicts(verdicts, out)
        return 0 if all(verdict.holds for verdict in verdicts) else EXIT_NO

    run(body)


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as fault:
        raise Stop(EXIT_USAGE, "report.unwritable", f"cannot write {path}: {fault.strerror or fault}") from fault


def parse_mix(text: str) -> dict[str, float]:
    """`name=weight,...` as a dictionary. Raises typer.BadParameter."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            mix[name] = float(weight or 1)
        except ValueError:
            raise typer.BadParameter(f"not a weight: {weight!r} in {text!r}") from None
    sound = all(math.isfinite(weight) and weight >= 0 for weight in mix.values())
    if not all(mix) or not sound or not 0 < sum(mix.values()) < math.inf:
        raise typer.BadParameter(f"a mix is flavor=weight,..., with weights above 0: {text!r}")
    return mix
