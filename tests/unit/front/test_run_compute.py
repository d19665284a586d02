"""The settings that `berth run compute` adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from berth.commands.run import durable_compute
from berth.settings import Settings
from compute_sim.config import ComputeConfig


@pytest.mark.parametrize(
    ("driver", "given", "expected"),
    [("ironic", None, "machines"), ("ironic", "elsewhere", "elsewhere"), ("hypervisor", None, None)],
)
def test_a_service_of_real_machines_keeps_its_records_by_default(
    tmp_path: Path, driver: str, given: str | None, expected: str | None
) -> None:
    """After a restart of one without records its healthy machines were unknown for a minute."""
    directory = None if given is None else str(tmp_path / given)
    compute = ComputeConfig(driver=driver, state_dir=directory)  # type: ignore[arg-type]
    kept = durable_compute(Settings(state_dir=str(tmp_path), compute=compute)).state_dir
    assert kept == (None if expected is None else str(tmp_path / expected))
