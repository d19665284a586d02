"""How much of some files the seeds run. The command runs again under coverage, which counts lines and branches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from coverage import Coverage

ROOT = Path(__file__).parents[2]


def run_covered(files: Sequence[str], arguments: Sequence[str]) -> int:
    """Run `python -m lab.simulation ARGUMENTS` under coverage, print what it ran of the files, and return its exit
    status.

    A process of its own, because this one has imported the files, and their first lines would count as not run.
    """
    with TemporaryDirectory() as folder:
        data = Path(folder, "coverage")
        covered = [sys.executable, "-m", "coverage", "run", "--branch", "--rcfile=", f"--data-file={data}"]
        covered += [f"--include={','.join(str(ROOT / name) for name in files)}", "-m", "lab.simulation", *arguments]
        status = subprocess.run(covered, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode
        coverage = Coverage(data_file=str(data), branch=True, config_file=False)
        coverage.load()
        for name in files:
            typer.echo("\n".join(report_of(coverage, name)))
    return status


def report_of(coverage: Coverage, name: str) -> Iterator[str]:
    """The percentages of one file, and what did not run: lines, and of lines that ran the branches not taken."""
    path = str(ROOT / name)
    _, lines, _, missing, _ = coverage.analysis2(path)
    branches = coverage.branch_stats(path)  # {line: (branches, those taken)}
    possible, taken = (sum(each) for each in zip(*branches.values(), strict=True)) if branches else (0, 0)
    ran = len(lines) - len(missing)
    of_lines, of_branches = _percent(ran, len(lines)), _percent(taken, possible)
    yield f"{name}: {of_lines} of {len(lines)} lines, {of_branches} of {possible} branches"
    source = (ROOT / name).read_text().splitlines()
    for line in missing:
        yield f"  {line}: not run: {source[line - 1].strip()}"
    for line, (some, those) in sorted(branches.items()):
        if those < some and line not in missing:
            yield f"  {line}: {those} of {some} branches: {source[line - 1].strip()}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 100:.1f} %"
