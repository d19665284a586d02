"""Plants each drawn mutant in a copy of the clone, and runs the tests of its package there; see scripts/mutation."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.mutation.warm import FAULT, KILLED, SURVIVED

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
# The tests of each package's rules.
TESTS_OF = {
    "placement_worker": ("tests/unit/placement", "tests/unit/replica", "tests/unit/placement_rest", "tests/contract"),
    "scheduler_worker": ("tests/unit/scheduler", "tests/contract"),
    "cell_conductor": ("tests/unit/conductor", "tests/contract"),
}


class CannotCheck(Exception):
    """Tests that cannot be run."""


class Outcome(StrEnum):
    """The end of a run of tests with a mutant."""

    SURVIVED = "survived"
    KILLED = "killed"
    HUNG = "hung"
    EQUIVALENT = "equivalent"  # it survived, and equivalent.toml has the reason why it changes nothing


class Reasons:
    """What equivalent.toml says: mutants that change nothing, each by its text."""

    def __init__(self, place: Path = EQUIVALENT) -> None:
        listed = tomllib.loads(place.read_text(encoding="utf-8")).get("mutant", [])
        self._of = {(each["path"], each["before"].strip(), each["after"].strip()): each["reason"] for each in listed}

    def of(self, mutant: dict[str, Any]) -> str:
        """Of this one; empty without any."""
        return self._of.get((mutant["path"], mutant["before"].strip(), mutant["after"].strip()), "")


def copied(place: Path) -> None:
    """Copy the tracked files, so that nobody's edits change what is checked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)


def environment(temporary: Path) -> dict[str, str]:
    """Without the settings of servers, so that no test uses any, and without threads that would be there at a fork."""
    kept = {name: value for name, value in os.environ.items() if name not in {"AMQP_URL", "DATABASE_URL"}}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def drawn(options: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """The mutants that the seed draws, by mutmut's own interpreter."""
    there = [path.relative_to(ROOT) for name in packages for path in (ROOT / name / "domain").rglob("*.py")]
    paths = sorted(str(path) for path in there if str(path) not in options.without)
    if options.file:
        paths = [path for path in paths if path in options.file]
    words = ["tests/mutation/drawn.py", "--seed", str(options.seed), "--mutants", str(options.mutants), *paths]
    done = subprocess.run([options.drawing_python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCheck(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def again(place: Path, packages: Sequence[str]) -> dict[str, Any]:
    """The survivors of an earlier run, planted where their text is now, in their file or another of the package. Those
    whose text is there no more are left out.
    """
    kept = []
    figures = json.loads(place.read_text(encoding="utf-8"))
    for mutant in figures["survivors"]:
        path, line = mutant["path"], mutant["line"]
        package = path.partition("/")[0]
        if package not in packages:
            continue
        others = sorted(str(one.relative_to(ROOT)) for one in (ROOT / package / "domain").rglob("*.py"))
        found = [(other != path, abs(at - line), other, at) for other in others for at in places_of(mutant, other)]
        if not found:
            sys.stdout.write(f"gone  {path}:{line}\n{lines('-', mutant['before'])}")
            continue
        *_, path, line = min(found)
        now = (ROOT / path).read_text(encoding="utf-8").split("\n")
        source = "\n".join([*now[: line - 1], mutant["after"], *now[line - 1 + mutant["before"].count("\n") + 1 :]])
        kept.append(mutant | {"path": path, "line": line, "source": source})
    return {"there": figures["there"], "drawn": kept}


def places_of(mutant: dict[str, Any], path: str) -> list[int]:
    """The lines of a file at which the text begins that a mutant replaces."""
    now, before = (ROOT / path).read_text(encoding="utf-8").split("\n"), mutant["before"].split("\n")
    return [at + 1 for at in range(len(now)) if now[at : at + len(before)] == before]


def checked(
    mutants: Sequence[dict[str, Any]], packages: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Outcome, str]]:
    """Each mutant, its outcome, and the test that failed; as they end. Raises CannotCheck."""
    with tempfile.TemporaryDirectory(prefix="berth-mutation-") as place:
        copy, temporary = Path(place, "clone"), Path(place, "tmp")
        temporary.mkdir()
        copied(copy)
        for package in packages:
            chosen = [one for one in mutants if one["path"].startswith(f"{package}/")]
            if chosen:
                yield from _of_package(package, chosen, copy, temporary, options)


def _of_package(
    package: str, mutants: Sequence[dict[str, Any]], copy: Path, temporary: Path, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Outcome, str]]:
    files = sorted({one["path"] for one in mutants})
    job = {"tests": options.tests or TESTS_OF[package], "files": files, "mutants": list(mutants), "jobs": options.jobs}
    place = temporary / f"{package}.json"
    place.write_text(json.dumps(job), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mutation.warm", str(place)],
        cwd=copy, env=environment(temporary), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    ) as warm:  # fmt: skip
        assert warm.stdout is not None
        left = len(mutants)
        for told in map(json.loads, warm.stdout):
            if told.get("status") == FAULT:
                warm.kill()
                raise CannotCheck(f"{package}: {told}")
            if "left_out" in told:
                sys.stdout.write(f"{package}: {told['left_out']} fails without a mutant, and is left out\n")
            if "tests" in told:
                sys.stdout.write(f"{package}: {told['tests']} tests, {told['seconds']:.0f} s of processor time\n")
            if "mutant" not in told:
                continue
            left -= 1
            outcome = {SURVIVED: Outcome.SURVIVED, KILLED: Outcome.KILLED}.get(told["status"], Outcome.HUNG)
            yield mutants[told["mutant"]], outcome, told["by"]
    if left:
        raise CannotCheck(f"{package}: the tests ended before {left} mutants were checked")


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="scripts/mutation", description=__doc__)
    parser.add_argument("--seed", type=lambda text: int(text, 0), default=1)
    parser.add_argument("--mutants", type=int, default=20)
    parser.add_argument("--package", choices=sorted(TESTS_OF), action="append")
    parser.add_argument("--file", action="append")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--again", type=Path)
    parser.add_argument("--tests", action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drawing-python", required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Print each survivor, and the count."""
    options = parsed()
    packages = sorted(options.package or TESTS_OF)
    began = time.monotonic()
    reasons = Reasons()
    survivors: list[dict[str, Any]] = []
    counted = dict.fromkeys(Outcome, 0)
    try:
        found = again(options.again, packages) if options.again else drawn(options, packages)
        for mutant, reached, by in checked(found["drawn"], packages, options):
            outcome = reached
            if outcome is Outcome.SURVIVED:
                reason = reasons.of(mutant)
                outcome = Outcome.EQUIVALENT if reason else outcome
                survivors.append({n: mutant[n] for n in ("path", "line", "before", "after")} | {"reason": reason})
            counted[outcome] += 1
            sys.stdout.write(f"{outcome}  {mutant['path']}:{mutant['line']}  {by}\n")
            if outcome is Outcome.SURVIVED:
                sys.stdout.write(f"{lines('-', mutant['before'])}{lines('+', mutant['after'])}")
            sys.stdout.flush()
    except CannotCheck as wrong:
        sys.stderr.write(f"berth: {wrong}\n")
        return 1
    killed = counted[Outcome.KILLED] + counted[Outcome.HUNG]
    figures = {
        "packages": packages,
        "seed": options.seed,
        "there": found["there"],
        "checked": len(found["drawn"]),
        "killed": killed,
        "hung": counted[Outcome.HUNG],
        "equivalent": counted[Outcome.EQUIVALENT],
        "survivors": survivors,
        "seconds": round(time.monotonic() - began),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(
        f"{killed} of {figures['checked']} mutants killed, {figures['hung']} of them hanging, "
        f"{len(survivors)} survived, {figures['equivalent']} of them with a reason; "
        f"seed {options.seed} of {found['there']} in {', '.join(packages)}, {figures['seconds']} s\n"
    )
    return 0


def lines(sign: str, text: str) -> str:
    """As a difference shows them."""
    return "".join(f"  {sign} {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
