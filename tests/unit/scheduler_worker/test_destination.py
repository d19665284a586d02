"""The cells that a move's destination may be in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.deploy import NetworkRequest
from bus.contracts.placement import LocatePage
from scheduler_worker.action.action_checks import CELL_DRAIN_USER
from scheduler_worker.action.destination import Chosen
from scheduler_worker.action.destination_request import Located
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.requests.request_delivery import LAST
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_moves import BUILD, BUILT, KNOWN, OTHER, UUID, choosing, requested

ACROSS = SchedulerConfig(actions_across_cells=True)
NETWORKS = (NetworkRequest(network=OTHER),)


@pytest.mark.parametrize("actions_across_cells", [True, False], ids=["on", "switched off since"])
async def test_a_move_of_a_cells_drain_stays_out_of_that_cell(actions_across_cells: bool) -> None:
    hosts = Hosts(
        [PLENTY] * 3, cells=["c", "c", "d"], config=SchedulerConfig(actions_across_cells=actions_across_cells)
    )
    request = requested(ActionKind.MIGRATE, user_id=CELL_DRAIN_USER)
    known = replace(KNOWN, build_request=replace(BUILT, image=None, image_properties={}))
    located = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    pending = PendingAction(batch_index=0, request=request, taken_at=1.0, delivery=LAST)
    chosen = await choosing(hosts).choose(pending, known, located)
    assert isinstance(chosen, Chosen)
    assert [one.host for one in chosen.selections] == (["h2"] if actions_across_cells else [])


@pytest.mark.parametrize(
    ("is_tied", "cells", "code"),
    [
        (True, ("c1", "c2"), "action.across_cells"),
        (True, ("c1", "c1"), None),
        (True, ("c1",), "no_valid_host"),  # no other cell has a host for it, either
        (False, ("c1", "c2"), None),
        (False, ("c1",), "no_valid_host"),
    ],
)
async def test_what_has_things_of_its_cell_finds_a_host_there_or_is_told_why(
    is_tied: bool, cells: Sequence[str], code: str | None
) -> None:
    hosts = Hosts([PLENTY] * len(cells), cells=cells, config=ACROSS)
    networks = NETWORKS if is_tied else ()
    build = replace(BUILD, cell="c1", host="h0")
    known = ActionContext(build=build, build_request=replace(BUILT, host=None, image=None, networks=networks))
    pending = PendingAction(batch_index=0, request=requested(ActionKind.MIGRATE), taken_at=1.0, delivery=LAST)
    source = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    chosen = await choosing(hosts).choose(pending, known, source)
    assert isinstance(chosen, Chosen)
    assert (chosen.failure and chosen.failure.code, len(chosen.selections)) == (code, int(code is None))
