"""How a call was decided: from the log of the front to what `berth explain` prints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from berth.cli import app
from scheduler_worker.nova.config import NovaConfig
from scheduler_worker.nova.envelope import RemoteFault
from tests.unit.nova.test_select import REBUILD, VMS, image
from tests.unit.nova.world import PLENTY, Cloud, destination, versioned

SMALL = {"VCPU": 1, "MEMORY_MB": 100, "DISK_GB": 10}


async def calls(*asked: dict[str, Any], instances: int = 1, shadow: bool = False) -> None:
    """Calls of one request, of which some find no host: h0 and h1 are small, h2 is not."""
    here = await Cloud([SMALL, SMALL, PLENTY], nova=NovaConfig(shadow=shadow)).open()
    for number, fields in enumerate(asked):
        try:
            await here.select(*VMS[:instances], run=f"call{number}", **fields)
        except RemoteFault as fault:
            assert not any(f"h{n}" in fault.message for n in range(3))


def logged(tmp_path: Path, *asked: dict[str, Any], instances: int = 1, shadow: bool = False) -> Path:
    with capture_logs() as lines:
        asyncio.run(calls(*asked, instances=instances, shadow=shadow))
    path = tmp_path / "log"
    written = [json.dumps({"timestamp": "t", "process": "front-1", **line}) for line in lines]
    path.write_text("\n".join(["no JSON req-1", '{"event": 7, "request_id": "req-1"}', *written]))
    return path


def explained(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments])
    return done.exit_code, done.output


def test_a_host_is_named_with_what_it_and_its_alternates_weighed(tmp_path: Path) -> None:
    status, text = explained("req-1", str(logged(tmp_path, {}, instances=2)))
    assert status == 0 and text.count(f"{VMS[0]}") == 2 and "h2.local" in text


def test_no_host_is_explained_with_the_hosts_that_each_step_rejected(tmp_path: Path) -> None:
    path = logged(tmp_path, {"ignore_hosts": ["h2"]}, {"requested_destination": destination(host="h1")})
    status, text = explained("req-1", str(path))
    assert status == 0
    assert "h0 (h0.local), h1 (h1.local) are too small in MEMORY_MB" in text
    assert "h2 (h2.local) were ignored as requested" in text
    assert "are not among the hosts that were requested" in text
    status, text = explained("req-1", str(path), "--json")
    first, second = json.loads(text)
    assert (first["funnel"][0]["step"], first["funnel"][-1]["step"]) == ("providers", "claim")
    assert first["instances"] == second["instances"] == [VMS[0]]


AGGREGATES = [f"00000000-0000-4000-8000-{number:012}" for number in range(20)]
PORTS = [versioned("RequestGroup", "1.3", {"requester_id": uuid, "resources": {"VCPU": 5}}) for uuid in AGGREGATES[:8]]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"requested_destination": destination(aggregates=[",".join(AGGREGATES)])}, "are not in aggregate one of 0000"),
        ({"requested_resources": PORTS}, "have room for each of groups 0000"),
    ],
    ids=["aggregates of a zone", "ports"],
)
def test_a_step_that_names_much_is_explained(tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    status, text = explained("req-1", str(logged(tmp_path, fields)))
    assert status == 0 and shown in text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"image": image(traits_required=["CUSTOM_MAGIC"])}, "h1 (h1.local)"),
        ({"force_hosts": ["h9"], "force_nodes": None}, "requested name"),
    ],
    ids=["image", "unknown host"],
)
def test_a_refused_check_of_a_rebuild_is_explained(tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    status, text = explained("req-1", str(logged(tmp_path, REBUILD | fields)))
    assert status == 0 and shown in text


def test_what_the_shadow_would_have_done_is_told_as_such(tmp_path: Path) -> None:
    status, text = explained("req-1", str(logged(tmp_path, {}, {"ignore_hosts": ["h2"]}, shadow=True)))
    assert status == 0 and text.count("in the shadow") == 2
    assert "h2.local" in text and "too small in MEMORY_MB" in text


def test_a_request_that_the_logs_do_not_have(tmp_path: Path) -> None:
    assert explained("req-2", str(logged(tmp_path, {})))[0] == 1
    assert explained("req-1", str(tmp_path / "none"))[0] == 2
