"""The options of `berth load`, each with its bounds and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from berth.load.plan import MAX_BOOTS

Boots = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_BOOTS, help="How many builds; default 1000, or all of a ramp or trace."),
]
Mix = Annotated[
    str,
    typer.Option(help="Flavors and their weights, `small=8,large=2,metal=1`; metal: all bare-metal flavors."),
]
Rate = Annotated[
    float, typer.Option(min=0, help="Open loop: boots per second, sent whatever the answers; latency from their times.")
]
Ramp = Annotated[str | None, typer.Option(help="Open loop at a changing rate, FROM..TO/SECONDS; finds the knee.")]
Concurrency = Annotated[int, typer.Option(min=0, help="Closed loop: this many in flight; 0 = all at once.")]
Trace = Annotated[Path | None, typer.Option(help="Replay the arrivals and deletions of this CSV file.")]
Speed = Annotated[float, typer.Option(min=1e-6, max=1e9, help="A trace runs this many times faster.")]
Deletes = Annotated[
    bool, typer.Option("--deletes/--no-deletes", help="A trace's deletions too; without them the fleet fills up.")
]
Skip = Annotated[
    float, typer.Option(min=0, help="Seconds of a trace to leave out; machines that exist then come at once.")
]
Churn = Annotated[float, typer.Option(min=0, max=1, help="The share deleted once it is active.")]
RetryFor = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to offer refused requests again (full queue); default: open loop 0, else all."),
]
Project = Annotated[str, typer.Option(help="Whose they are.")]
Seed = Annotated[int | None, typer.Option(help="Draw flavors, and which are deleted, from this seed; uuids are new.")]
BusUrl = Annotated[str | None, typer.Option(help="The API bus, amqp://..., instead of the settings'.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the record as JSON; - is stdout.")]
ReportFile = Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")]
Compare = Annotated[tuple[Path, Path] | None, typer.Option(help="Fire nothing: compare two records that --json wrote.")]
