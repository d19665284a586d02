"""The summary that scripts/nightly bad-input makes of schemathesis's own report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.openapi.bad_input import judged

FIGURES: dict[str, Any] = {
    "seed": 1,
    "running_time": 6.8512,
    "complete": True,
    "operations": {"total": 36, "selected": 36, "tested": 36},
    "test_cases": {"generated": 1524, "with_failures": 0, "errored": 0},
    "errors": [],
}


def summary(folder: Path, status: int = 0, **changed: Any) -> dict[str, Any]:
    report = folder / "schemathesis.json"
    report.write_text(json.dumps({**FIGURES, **changed}))
    return judged(status, report)


def test_all_done_and_nothing_wrong(tmp_path: Path) -> None:
    assert summary(tmp_path) == {
        "passed": True, "seed": 1, "operations": 36, "requests": 1524, "failures": 0, "errors": 0, "seconds": 6.9,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"status": 1},
        {"complete": False},
        {"operations": {"total": 36, "tested": 35}},
        {"operations": {"total": 0, "tested": 0}},
        {"test_cases": {"generated": 0, "with_failures": 0, "errored": 0}},
        {"test_cases": {"generated": 9, "with_failures": 1, "errored": 0}},
        {"test_cases": {"generated": 9, "with_failures": 0, "errored": 1}},
        {"errors": ["the connection was lost"]},
    ],
)
def test_less_than_all_or_something_wrong(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert summary(tmp_path, **changed)["passed"] is False


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"test_cases": {"generated": 5}, "operations": {}}'])
def test_a_report_that_cannot_be_read_is_a_failure(tmp_path: Path, text: str | None) -> None:
    report = tmp_path / "schemathesis.json"
    if text is not None:
        report.write_text(text)
    answer = judged(0, report)
    assert (answer["passed"], answer["requests"]) == (False, 0)
    assert "schemathesis.json" in answer["unreadable"]
