"""The derived pages hold what the code holds, and the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.reference.pages import PAGES
from scheduler_worker.config import DEFAULT_FILTERS, DEFAULT_WEIGHERS, MORE_FILTERS

DOCS = Path(__file__).parents[3] / "docs"
# Sphinx keeps all that it makes to the end; to look for garbage in it is a quarter of the processor that it takes.
BUILD = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("page", PAGES)
def test_a_derived_page_is_up_to_date(page: str) -> None:
    assert (DOCS / "reference" / page).read_text() == PAGES[page](), "run scripts/nightly docs"


def test_every_message_and_queue_and_state_is_on_the_page() -> None:
    page = PAGES["messages.md"]()
    from bus.contracts.build import BuildState  # noqa: PLC0415
    from bus.contracts.catalogue import MESSAGES, QUEUES  # noqa: PLC0415

    assert all(f"### `{row.tag}`" in page for row in MESSAGES)
    assert all(f"| `{row.name}` |" in page for row in QUEUES)
    assert "`BuildState`: one of " + ", ".join(f"`{state}`" for state in sorted(BuildState)) in page


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stderr


def test_features_has_the_filters_and_weighers_that_there_are_and_no_other() -> None:
    """Names in code type are there; ProjectHostFilter is berth's own."""
    page = (DOCS / "reference" / "features.md").read_text()
    named = set(re.findall(r"`(\w*(?:Filter|Weigher|Isolation))`", page))
    there = {path.rpartition(".")[2] for path in (*DEFAULT_FILTERS, *MORE_FILTERS, *DEFAULT_WEIGHERS)}
    assert named == there - {"ProjectHostFilter"}


def test_a_decision_record_has_its_number_a_date_and_a_status() -> None:
    records = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        title, empty, status = record.read_text().split("\n")[:3]
        assert title.startswith(f"# {record.name[:4]}. "), record.name
        assert not empty
        assert status.startswith("Date: 20"), record.name
        assert any(f"Status: {word}" in status for word in ("proposed", "accepted", "superseded by")), record.name
