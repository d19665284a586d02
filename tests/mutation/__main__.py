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
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.mutation.warm import FAULT, KILLED, SURVIVED, UNREACHED

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
# The tests of each package, in a process without servers.
TESTS_OF = {
    "berth": ("tests/unit/berth", "tests/integration/berth"),
    "bus": ("tests/unit/bus", "tests/unit/service", "tests/contract"),
    "cell_conductor": ("tests/unit/cell_conductor", "tests/contract"),
    "compute_agent": ("tests/unit/compute_agent", "tests/integration/compute_agent"),
    "compute_sim": ("tests/unit/compute_agent", "tests/integration/compute_agent"),
    "gateway": ("tests/unit/gateway",),
    "ironic_sync": ("tests/unit/ironic_sync", "tests/integration/ironic_sync"),
    "nova_scheduler": ("tests/unit/nova_scheduler",),
    "placement_worker": (
        "tests/unit/placement_worker", "tests/unit/replica", "tests/unit/placement_rest",
        "tests/integration/placement_rest", "tests/integration/replica", "tests/contract",
    ),
    "scheduler_worker": ("tests/unit/scheduler_worker", "tests/unit/nova_scheduler", "tests/contract"),
}  # fmt: skip
# Beside these, with servers.
WITH_SERVERS = {
    "bus": ("tests/integration/bus",), "cell_conductor": ("tests/integration/cell_conductor",),
    "gateway": ("tests/integration/gateway",), "nova_scheduler": ("tests/integration/nova_scheduler",),
    "placement_worker": ("tests/integration/placement_worker",),
    "scheduler_worker": ("tests/integration/scheduler_worker", "tests/integration/nova_scheduler"),
}  # fmt: skip
# What tries and measures berth is no product.
OF_NO_PRODUCT = ("berth/up", "*/migrations", "bus/persistence/alembic")
# What talks to a server is reached by tests with that server alone; commands, and what makes a worker, by whole ones.
# Of these a mutant counts so where no test without servers runs its function.
ONLY_WITH_SERVERS = (
    "*/app.py", "*/store/postgres*.py", "*/store/tables.py", "*/__main__.py", "berth/audit/*", "berth/backup/*",
    "berth/cli/*", "berth/config/schemas.py", "berth/config/site.py", "berth/web/server.py",
    "bus/persistence/address.py", "bus/persistence/database.py", "bus/persistence/database_faults.py",
    "bus/persistence/guarded_statement.py", "bus/persistence/migrations.py", "bus/persistence/revision.py",
    "bus/persistence/rights.py", "bus/persistence/tables.py", "bus/rabbitmq/*",
    "nova_scheduler/rpc/*", "nova_scheduler/stock/forwarder.py",
    "placement_worker/operations/*", "placement_worker/rest/*",
    "placement_worker/store/feed.py", "placement_worker/store/trees.py",
    "scheduler_worker/drain/drain_controller.py",
    "scheduler_worker/objects/object_registry.py", "scheduler_worker/objects/operator_changes.py",
    "scheduler_worker/store/object_rows.py",
)  # fmt: skip


class CannotCheck(Exception):
    """Tests that cannot be run."""


class Outcome(StrEnum):
    """The end of a run of tests with a mutant."""

    SURVIVED = "survived"
    KILLED = "killed"
    HUNG = "hung"
    ONLY_WITH_SERVERS = "only with servers"  # no test without servers runs it, nor is meant to
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


def environment(temporary: Path, *, servers: bool) -> dict[str, str]:
    """No settings of servers, unless they are wanted, and no threads that would be there at a fork."""
    unwanted = set() if servers else {"AMQP_URL", "DATABASE_URL"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def product(package: str) -> list[str]:
    """The files of a package, but what is no product."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [str(path.relative_to(ROOT)) for path in paths]
    return [name for name in names if not any(fnmatch(name, f"{one}/*") for one in OF_NO_PRODUCT)]


def drawn(options: argparse.Namespace, packages: Sequence[str]) -> list[dict[str, Any]]:
    """The mutants that the seed draws, by mutmut's own interpreter."""
    paths = [path for name in packages for path in product(name) if path not in options.without]
    if options.file:
        paths = [path for path in paths if path in options.file]
    words = ["tests/mutation/drawn.py", "--seed", str(options.seed), "--mutants", str(options.mutants), *paths]
    done = subprocess.run([options.drawing_python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCheck(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def again(place: Path, packages: Sequence[str]) -> list[dict[str, Any]]:
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
        found = [
            (other != path, abs(at - line), other, at) for other in product(package) for at in places_of(mutant, other)
        ]
        if not found:
            sys.stdout.write(f"gone  {path}:{line}\n{lines('-', mutant['before'])}")
            continue
        *_, path, line = min(found)
        now = (ROOT / path).read_text(encoding="utf-8").split("\n")
        source = "\n".join([*now[: line - 1], mutant["after"], *now[line - 1 + mutant["before"].count("\n") + 1 :]])
        kept.append(mutant | {"path": path, "line": line, "source": source})
    return kept


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
            chosen.sort(key=lambda one: (one["path"], one["line"]))
            if chosen:
                yield from _of_package(package, chosen, copy, temporary, options)


def _of_package(
    package: str, mutants: Sequence[dict[str, Any]], copy: Path, temporary: Path, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Outcome, str]]:
    files = sorted({one["path"] for one in mutants})
    tests = options.tests or [*TESTS_OF[package], *(WITH_SERVERS.get(package, ()) if options.servers else ())]
    job = {"tests": tests, "files": files, "mutants": mutants, "jobs": options.jobs, "servers": options.servers}
    place = temporary / f"{package}.json"
    place.write_text(json.dumps(job), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mutation.warm", str(place)],
        cwd=copy, env=environment(temporary, servers=options.servers), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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
            mutant = mutants[told["mutant"]]
            is_reached = not any(fnmatch(mutant["path"], one) for one in ONLY_WITH_SERVERS)
            unreached = Outcome.SURVIVED if is_reached or options.servers else Outcome.ONLY_WITH_SERVERS
            known = {SURVIVED: Outcome.SURVIVED, KILLED: Outcome.KILLED, UNREACHED: unreached}
            by = "no test runs it" if told["status"] == UNREACHED else told["by"]
            yield mutant, known.get(told["status"], Outcome.HUNG), by
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
    parser.add_argument("--servers", action="store_true")
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
    of_packages: dict[str, dict[Outcome, int]] = {}
    counted = dict.fromkeys(Outcome, 0)
    try:
        found = again(options.again, packages) if options.again else drawn(options, packages)
        for mutant, reached, by in checked(found, packages, options):
            outcome, reason = reached, ""
            if outcome in (Outcome.SURVIVED, Outcome.ONLY_WITH_SERVERS):
                reason = reasons.of(mutant)
                outcome = Outcome.EQUIVALENT if reason else outcome
                reason = reason or ("" if outcome is Outcome.SURVIVED else outcome)
                survivors.append({n: mutant[n] for n in ("path", "line", "before", "after")} | {"reason": reason})
            counted[outcome] += 1
            of_packages.setdefault(mutant["path"].partition("/")[0], dict.fromkeys(Outcome, 0))[outcome] += 1
            sys.stdout.write(f"{outcome}  {mutant['path']}:{mutant['line']}  {by}\n")
            if outcome in (Outcome.SURVIVED, Outcome.ONLY_WITH_SERVERS):
                sys.stdout.write(f"{lines('-', mutant['before'])}{lines('+', mutant['after'])}")
            sys.stdout.flush()
    except CannotCheck as wrong:
        sys.stderr.write(f"berth: {wrong}\n")
        return 1
    killed = counted[Outcome.KILLED] + counted[Outcome.HUNG]
    figures = {
        "packages": of_packages,
        "seed": options.seed,
        "checked": len(found),
        "killed": killed,
        "hung": counted[Outcome.HUNG],
        "equivalent": counted[Outcome.EQUIVALENT],
        "only_with_servers": counted[Outcome.ONLY_WITH_SERVERS],
        "survivors": survivors,
        "seconds": round(time.monotonic() - began),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(
        f"{killed} of {figures['checked']} mutants killed, {figures['hung']} of them hanging, "
        f"{len(survivors)} survived, {figures['equivalent']} of them with a reason, "
        f"{figures['only_with_servers']} only with servers; "
        f"seed {options.seed} in {', '.join(packages)}, {figures['seconds']} s\n"
    )
    return 0


def lines(sign: str, text: str) -> str:
    """As a difference shows them."""
    return "".join(f"  {sign} {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
