"""Record what the cell's state machine does in simulations, and compare another version of it with that.

    python -m tests.sim.recorded_steps record FILE --seeds 60      (with the old code)
    python -m tests.sim.recorded_steps compare FILE                (with the new code)

The steps of a run follow from one another, so two versions are not compared by two runs: the record, the event and the
context of each step of the old one are given to the new one. Compared are the record after it and the messages sent,
whose order does not count. Of steps that look alike (state, event, state after, kinds of messages) only some are kept.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from cell_conductor import transition
from cell_conductor.state.instance import Instance
from cell_conductor.state.step import Step, StepContext
from lab.simulation.__main__ import redirect_logs
from lab.simulation.run import simulate
from lab.simulation.widening import WIDENED, Widening

MOST_ALIKE = 200
main = typer.Typer(add_completion=False)


def digest_of(stepped: Step) -> tuple[str, tuple[str, ...]]:
    """(of the record after the step, of each message): what two versions have to agree on."""
    messages = sorted(f"{type(one).__name__} {_digest(one)}" for one in stepped.commands)
    return _digest(stepped.instance), tuple(messages)


def _digest(value: Any) -> str:
    # Not as JSON: what is left out there as a default depends on which object a float is.
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@main.command()
def record(
    path: Path,
    first_seed: int = 1,
    seeds: int = 60,
    only: Annotated[list[Widening] | None, typer.Option()] = None,
) -> None:
    """Run these seeds, and keep their steps."""
    redirect_logs()
    alike: Counter[tuple[str, ...]] = Counter()
    stepped_by = transition.step
    with gzip.open(path, "ab") as file:

        def step(instance: Instance, event: Any, context: StepContext) -> Step:
            stepped = stepped_by(instance, event, context)
            kinds = tuple(type(one).__name__ for one in stepped.commands)
            key = (instance.state, type(event).__name__, stepped.instance.state, *kinds)
            alike[key] += 1
            if alike[key] <= MOST_ALIKE:
                pickle.dump((instance, event, context, digest_of(stepped)), file)
            return stepped

        with patch("cell_conductor.engine.step", step), patch("cell_conductor.transition.step", step):
            for seed in range(first_seed, first_seed + seeds):
                simulate(seed, frozenset(only or WIDENED))
    typer.echo(
        f"{sum(alike.values())} steps of {len(alike)} kinds, {sum(min(n, MOST_ALIKE) for n in alike.values())} kept"
    )


def recorded(path: Path) -> Iterator[tuple[Instance, Any, StepContext, tuple[str, tuple[str, ...]]]]:
    """The steps that were kept."""
    with gzip.open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


@main.command()
def compare(path: Path, shown: int = 3) -> None:
    """Take the recorded steps again, and show those that are otherwise."""
    count, found = 0, Counter[tuple[str, str, str]]()
    for instance, event, context, (before_record, before_messages) in recorded(path):
        count += 1
        try:
            stepped = transition.step(instance, event, context)
        except transition.IllegalStep as fault:
            found[str(instance.state), type(event).__name__, f"raises {fault}"[:100]] += 1
            continue
        after_record, after_messages = digest_of(stepped)
        if (after_record, after_messages) == (before_record, before_messages):
            continue
        names = [one.split()[0] for one in before_messages], [one.split()[0] for one in after_messages]
        what = (
            f"{names[0]} are {names[1]}" if names[0] != names[1] else "messages" * (before_messages != after_messages)
        )
        what += " and the record" * (after_record != before_record)
        key = (str(instance.state), type(event).__name__, what)
        found[key] += 1
        if found[key] <= shown:
            typer.echo(f"{key}\n  {event!r}\n  {instance!r}\n  {stepped!r}"[:6000])
    for key, times in sorted(found.items()):
        typer.echo(f"{times:6} {key}")
    typer.echo(f"{count} steps, {sum(found.values())} otherwise")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    main()
