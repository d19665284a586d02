"""Which cell serves the nodes: the setting goes with every update, and an unknown name ends at once."""

from __future__ import annotations

import pytest

from bus.service.environment import Environment
from bus.service.settings import SettingsError
from ironic_sync.app import build
from ironic_sync.config import IronicSyncConfig
from tests.unit.ironic.nodes import world


@pytest.mark.parametrize(("cell", "expected"), [("cell1", "cell1"), ("", None)])
async def test_every_update_names_the_cell_of_the_node(cell: str, expected: str | None) -> None:
    _, here = world(cell=cell)
    async with here.running():
        await here.settle()
        assert {update.cell for update in here.book.updates} == {expected}


def test_an_unknown_cell_is_an_error() -> None:
    """Its nodes would be open to no cell."""

    def no_bus(name: str) -> None:
        raise AssertionError(name)

    env = Environment("p", transports=no_bus, cells=("cell1", "cell2"))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no cell 'cell3'; the settings know cell1, cell2"):
        build(env, IronicSyncConfig(cell="cell3"))
