"""The metrics that deploy/ queries of Prometheus exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\bberth_[a-z0-9_]+")


def test_every_metric_of_the_dashboard_and_the_rules_is_exported() -> None:
    """A metric that is renamed leaves a panel empty, and an alert silent, without a word."""
    known = set(NAME.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    files = (ROOT / "deploy" / "grafana" / "berth.json", *(ROOT / "deploy" / "prometheus").glob("*.yml"))
    requested = {name.removesuffix("_bucket") for file in files for name in NAME.findall(file.read_text())}
    assert requested - known == set()
    assert len(requested) > 20
