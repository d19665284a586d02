"""The derived pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

import berth.docs
import cell_conductor.domain.render

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("page", "derived"),
    [("messages.md", berth.docs.render), ("states.md", cell_conductor.domain.render.render)],
    ids=["messages", "states"],
)
def test_a_derived_page_is_up_to_date(page: str, derived) -> None:  # type: ignore[no-untyped-def]
    assert (DOCS / page).read_text() == derived(), "run scripts/docs"


def test_every_message_and_queue_and_state_is_on_the_page() -> None:
    page = berth.docs.render()
    from bus.contracts.build import BuildState  # noqa: PLC0415
    from bus.contracts.catalogue import MESSAGES, QUEUES  # noqa: PLC0415

    assert all(f"### `{row.tag}`" in page for row in MESSAGES)
    assert all(f"| `{row.name}` |" in page for row in QUEUES)
    assert "`BuildState`: one of " + ", ".join(f"`{state}`" for state in sorted(BuildState)) in page
