"""`scripts/simulate --coverage`: what is printed of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage import Coverage

from lab.simulation import coverage_report
from lab.simulation.__main__ import without_option

SOURCE = """\
def halve(number, whole):
    if whole:
        return number // 2
    return number / 2
"""


@pytest.mark.parametrize(
    ("wholes", "printed"),
    [
        (
            [True],
            [
                "halve.py: 75.0 % of 4 lines, 50.0 % of 2 branches",
                "  4: not run: return number / 2",
                "  2: 1 of 2 branches: if whole:",
            ],
        ),
        ([True, False], ["halve.py: 100.0 % of 4 lines, 100.0 % of 2 branches"]),
    ],
)
def test_what_did_not_run_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wholes: list[bool], printed: list[str]
) -> None:
    monkeypatch.setattr(coverage_report, "ROOT", tmp_path)
    path = tmp_path / "halve.py"
    path.write_text(SOURCE)
    coverage = Coverage(data_file=None, branch=True, config_file=False, include=[str(path)])
    with coverage.collect():
        names: dict[str, object] = {}
        exec(compile(SOURCE, str(path), "exec"), names)
        for whole in wholes:
            names["halve"](4, whole)  # type: ignore[operator]
    assert list(coverage_report.report_of(coverage, "halve.py")) == printed


def test_the_option_is_not_handed_on() -> None:
    arguments = ["--coverage", "a.py", "--seeds", "2", "--coverage=b.py", "--alone"]
    assert without_option("--coverage", arguments) == ["--seeds", "2", "--alone"]
