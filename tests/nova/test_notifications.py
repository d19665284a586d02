"""Each payload of a notification is the one that Nova writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from scheduler_worker.nova.notifications import payload_of
from tests.kit.nova_peer import PYTHON, needs_nova

WRITER = Path(__file__).with_name("write_notifications.py")
LONGEST_S = 120  # a limit against hanging


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
    run = subprocess.run([PYTHON, WRITER], capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert run.returncode == 0, run.stderr[-2_000:]
    written = json.loads(run.stdout)
    assert len(written) >= 10
    for spec, payload in written:
        assert plain(payload_of(spec)) == plain(payload)
