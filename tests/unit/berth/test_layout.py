"""Packages, folders and modules import in one direction; docs/concepts/architecture.md describes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import sources
from tests.kit.layout import LAYERS, MAY_IMPORT, Arrow, arrows, circles, graph
from tests.kit.sources import ROOT, within

# Three modules of the laboratory; no circle of the product.
MODULE_CIRCLES = {frozenset(f"lab.simulation.{name}" for name in ("message_watch", "wiring", "world"))}
IN_FOLDERS = ("scheduler_worker", "cell_conductor", "compute_agent", "compute_sim", "nova_scheduler", "berth")


@pytest.fixture(scope="module")
def found() -> Iterator[list[Arrow]]:
    yield arrows()
    sources.forget()


def package_of(module: str) -> str:
    return module.partition(".")[0]


def test_no_module_imports_one_that_imports_it(found: list[Arrow]) -> None:
    assert set(circles(graph(found))) <= MODULE_CIRCLES


def test_no_folder_imports_one_that_imports_it(found: list[Arrow]) -> None:
    inside = [arrow for arrow in found if package_of(arrow.user) == package_of(arrow.used) in IN_FOLDERS]
    assert circles(graph(inside, depth=2)) == []


def test_a_package_imports_of_others_only_what_it_may(found: list[Arrow]) -> None:
    wrong = [
        arrow
        for arrow in found
        if (package := package_of(arrow.user)) in MAY_IMPORT
        and not any(within(arrow.used, allowed) for allowed in (package, *MAY_IMPORT[package]))
    ]
    assert wrong == []


def test_what_a_package_may_import_is_there() -> None:
    """A prefix that stayed behind when a module moved would allow what takes its name next."""
    named = {name.replace(".", "/") for allowed in MAY_IMPORT.values() for name in allowed}
    assert sorted(name for name in named if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()) == []


@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_imports_only_layers_below_it(package: str, found: list[Arrow]) -> None:
    layer_of = {name: at for at, names in enumerate(LAYERS[package].split("|")) for name in names.split()}
    inside = [
        (arrow.user.split(".")[1], arrow.used.split(".")[1], arrow)
        for arrow in found
        if within(arrow.user, package) and within(arrow.used, package) and package not in arrow[:2]
    ]
    assert sorted({name for pair in inside for name in pair[:2]} - layer_of.keys()) == []
    assert [arrow for user, used, arrow in inside if layer_of[user] < layer_of[used]] == []
