"""Each RequestSpec of Nova's own unit tests, and each that functional tests asked with (`asked_specs.jsonl`), gives the
query string that Nova gives it; and each payload of a notification is the one that Nova writes.

Nova's side is made by `capture_queries.py` in a Python that has Nova and Placement (`BERTH_NOVA_PYTHON`, or the
virtualenv `.berth/nova`); without one these tests are skipped. Each spec is asked in several worlds: settings,
aggregates, nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nova_scheduler.decide.notifications import payload_of
from nova_scheduler.request.releases import SINCE
from nova_scheduler.request.request_spec import NotDecided, parse_request_spec
from nova_scheduler.request.resource_request import PrefilterSettings, querystring, resource_request, translated
from scheduler_worker.config import Aggregate
from scheduler_worker.selection.request_spec import Unsatisfiable
from tests.kit.nova_peer import PYTHON, needs_nova

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LONGEST_S = 1_200  # a limit against hanging
LEAST_SPECS = 100  # of Nova 34; fewer are a hook that does not record any more


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Nova makes of the specs of its own unit tests."""
    python = Path(os.environ.get("BERTH_NOVA_PYTHON", ROOT / ".berth" / "nova" / "bin" / "python"))
    if not python.exists():
        pytest.skip("no Python with Nova: BERTH_NOVA_PYTHON, or the virtualenv .berth/nova")
    path = tmp_path_factory.mktemp("nova") / "queries.json"
    run = subprocess.run(
        [python, HERE / "capture_queries.py", path, HERE / "asked_specs.jsonl"],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    return json.loads(path.read_text())  # type: ignore[no-any-return]


class World:
    """The facts of one world, as `capture_queries.py` has set them up in Nova."""

    def __init__(self, world: dict[str, Any]) -> None:
        self._world = world

    def aggregates(self) -> list[Aggregate]:
        return [Aggregate(**one) for one in self._world["aggregates"]]

    def nodes_named(self, host: str | None, nodename: str | None = None) -> list[str]:
        wanted = (host or None, nodename or None)
        return [
            one["uuid"]
            for one in self._world["nodes"]
            if wanted[0] in {None, one["host"]} and wanted[1] in {None, one["node"]}
        ]

    def cell_of(self, uuid: str) -> str | None:
        return next((str(one["cell"]) for one in self._world["nodes"] if one["uuid"] == uuid), None)


def outcome(case: dict[str, Any], release: int) -> tuple[str, object]:
    """What berth makes of a case, in the terms of the capture, and whether Placement refuses it."""
    world = case["world"]
    asked = parse_request_spec(case["spec"]), PrefilterSettings(**world["settings"]), World(world)
    requires_owner = world["requires_owner"] and release >= SINCE["OWNER_NOVA"]
    options = {"requires_owner": requires_owner, "pinning": case["pinning"], "release": release}
    try:
        found = translated(*asked, **options)
        if isinstance(found, Unsatisfiable):
            return "no_valid_host", None
        is_refused = isinstance(resource_request(*asked, **options), Unsatisfiable)
    except NotDecided as why:
        return "not_decided", why.reason
    return "querystring", (querystring(found), found.cpu_pinning_requested, is_refused)


def wanted(expected: dict[str, Any]) -> tuple[str, object]:
    if "querystring" in expected:
        return "querystring", (expected["querystring"], expected["pinned"], expected["refused"] is not None)
    return ("no_valid_host", None) if "no_valid_host" in expected else ("not_decided", expected["raised"])


def test_the_capture_ran_as_nova_meant_its_tests(captured: dict[str, Any]) -> None:
    assert captured["failed"] == []
    assert captured["specs"] >= LEAST_SPECS


def test_each_query_string_is_novas(captured: dict[str, Any]) -> None:
    different, counts = [], Counter[str]()
    for case in captured["cases"]:
        mine, novas = outcome(case, captured["release"]), wanted(case["expected"])
        counts[novas[0]] += 1
        # What Nova fails on, berth leaves to Nova; so a TPM secret of no known kind, which Nova's API lets none have.
        is_left = mine[0] == "not_decided" and (novas[0] == "not_decided" or mine[1] == "tpm_secret_security")
        if mine != novas and not is_left:
            different.append({"mine": mine, "nova": case["expected"], "case": case})
    total = len(captured["cases"])
    print(f"{total - len(different)} of {total} equal ({captured['specs']} specs): {dict(counts)}")  # noqa: T201
    assert not different, json.dumps(different[:3], indent=1, default=str)


# --- Notifications.


def plain(value: Any) -> Any:
    """Without what a payload has no use for: which fields were changed. Sets are written in any order."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key != "nova_object.changes"}
    return (
        sorted(value, key=str)
        if isinstance(value, list) and all(isinstance(one, int) for one in value)
        else ([plain(one) for one in value] if isinstance(value, list) else value)
    )


@needs_nova
def test_payloads_are_novas_own() -> None:
    command = [PYTHON, HERE / "write_notifications.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert run.returncode == 0, run.stderr[-2_000:]
    written = json.loads(run.stdout)
    assert len(written) >= 10
    for spec, payload in written:
        assert plain(payload_of(spec)) == plain(payload)
