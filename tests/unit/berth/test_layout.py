"""The layout of `scripts/rename/layout.tsv`: nobody adds a circle or an arrow upwards before the files have moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import sources
from tests.kit.layout import MAY_IMPORT, Arrow, arrows, circles, graph

# Three modules of the laboratory; no circle of the product.
MODULE_CIRCLES = {frozenset(f"lab.simulation.{name}" for name in ("message_watch", "wiring", "world"))}
IN_FOLDERS = ("scheduler_worker", "cell_conductor", "compute_agent", "compute_sim", "nova_scheduler", "berth")


@pytest.fixture(scope="module")
def found() -> Iterator[list[Arrow]]:
    yield arrows()
    sources.forget()


def test_no_module_uses_one_that_uses_it(found: list[Arrow]) -> None:
    assert set(circles(graph(found))) <= MODULE_CIRCLES


def test_no_folder_uses_one_that_uses_it(found: list[Arrow]) -> None:
    inside = [
        arrow
        for arrow in found
        if (package := arrow.user_place.partition(".")[0]) in IN_FOLDERS
        and package == arrow.used_place.partition(".")[0]
    ]
    assert circles(graph(inside, depth=2)) == []


def test_no_package_uses_one_above_it(found: list[Arrow]) -> None:
    upwards = {
        arrow
        for arrow in found
        if (package := arrow.user_place.partition(".")[0]) != (other := arrow.used_place.partition(".")[0])
        and package in MAY_IMPORT
        and other not in MAY_IMPORT[package]
    }
    assert upwards == set()
