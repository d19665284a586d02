"""Which fenced host an instance is on, by record. Pure."""

from __future__ import annotations

import pytest

from bus.contracts.build import BuildState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.evacuations import FencedHost, host_of

A, B = (FencedHost(f"{n}0000000-0000-4000-8000-000000000000", "h1", cell, 1) for n, cell in ((1, "c1"), (2, "c2")))
SOMEWHERE = FencedHost("30000000-0000-4000-8000-000000000000", "h1", None, 1)


@pytest.mark.parametrize(
    ("host", "cell", "fenced", "found"),
    [
        ("h1", "c1", [A, B], A),
        ("h1", "c2", [A, B], B),
        ("h1", "c3", [A, B], None),
        ("h1", "c3", [A, SOMEWHERE], SOMEWHERE),
        ("h2", "c1", [A], None),
        (None, "c1", [A], None),
    ],
)
def test_an_instance_is_on_the_fenced_host_of_its_cell_alone(
    host: str | None, cell: str, fenced: list[FencedHost], found: FencedHost | None
) -> None:
    build = RecordedBuild(
        instance_uuid="a", project_id="p", state=BuildState.ACTIVE, sequence=1, terminal=True, cell=cell, host=host
    )
    assert host_of(build, {"h1": fenced}) == found
