"""What a recovering cell is told: the range of a page, its bounds, and what it says of one instance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionState, CellAction, CellTransferOut, Condition
from bus.contracts.base import encode
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ConfigDrive, ImageSource
from bus.contracts.operations import CellFence
from bus.contracts.placement_queries import ConsumerRecord
from bus.contracts.recovery import (
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    MAX_PLACES,
    MAX_PROVIDERS,
    CellKnown,
    CellRecovering,
    KnownPlace,
    KnownRecord,
)
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RecordedAction, Transfer
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild
from scheduler_worker.upkeep.recovery_rules import InstanceSources, KnownPage, UuidRange, joined, known_record


def uuid(n: int) -> str:
    return f"{n:08x}-0000-4000-8000-000000000000"


def some(*numbers: int, last: int = 0) -> UuidRange:
    return UuidRange(tuple(map(uuid, numbers)), uuid(last) if last else "")


# --- the range of a page


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (some(), some(), some()),
        (some(1, 2), some(2, 3), some(1, 2, 3)),
        (some(1, 2, last=2), some(2, 3), some(1, 2, last=2)),
        (some(1, 2), some(2, 3, last=3), some(1, 2, 3, last=3)),
        (some(1, 9, last=9), some(2, 3, last=3), some(1, 2, 3, last=3)),
        (some(last=4), some(1, 7, last=7), some(1, last=4)),
        (some(5, last=9), some(last=3), some(last=3)),
    ],
)
def test_two_sources_are_told_as_far_as_both_were_looked_at(
    one: UuidRange, other: UuidRange, together: UuidRange
) -> None:
    assert joined(one, other) == joined(other, one) == together


def test_pages_of_any_two_sources_have_each_uuid_once() -> None:
    rng = random.Random(5)
    for _ in range(300):
        both = [sorted(rng.sample(range(1, 60), rng.randrange(40))) for _ in range(2)]
        found, after = list[str](), 0
        while True:
            parts = []
            for numbers in both:
                size = rng.randrange(1, 9)
                behind = [n for n in numbers if n > after]
                parts.append(some(*behind[:size], last=behind[size - 1] if len(behind) > size else 0))
            got = joined(*parts)
            found += got.uuids
            if not got.last:
                break
            assert got.last > uuid(after)
            after = int(got.last[:8], 16)
        assert found == [uuid(n) for n in sorted({*both[0], *both[1]})]


def test_a_range_has_no_more_than_a_page_may() -> None:
    numbers = range(1, MAX_KNOWN + 2)
    exact = joined(some(*numbers[:-1]), some())
    assert len(exact.uuids) == MAX_KNOWN and exact.last == ""
    cut = joined(some(*numbers[::2]), some(*numbers[1::2]))
    assert len(cut.uuids) == MAX_KNOWN and cut.last == uuid(MAX_KNOWN)


# --- one page


def fence(n: int) -> CellFence:
    return CellFence(host_uuid=uuid(n), host=f"host-{n}", version=1)


def ask(after: int = 0, asked: Sequence[int] = ()) -> CellRecovering:
    return CellRecovering(
        cell="c1",
        process="conductor-1",
        query_id=uuid(0xFFFF),
        after=uuid(after) if after else "",
        asked=tuple(map(uuid, asked)),
    )


def filled(
    question: CellRecovering, wanted: UuidRange, fences: Sequence[int] = (), drive: int = 0
) -> tuple[list[str], list[str], str]:
    """The instances, the fenced hosts and the end of a page. drive: the bytes of each configuration drive."""
    page = KnownPage(question, wanted, [fence(n) for n in fences])
    for one in page.wanted.uuids:
        config = ConfigDrive(user_data="x" * drive) if drive else None
        spec = InstanceSpec(instance_uuid=one, project_id="p", config_drive=config)
        page.add(KnownRecord(instance_uuid=one, spec=spec))
    message = page.message()
    assert msgspec.json.decode(encode(message), type=CellKnown) == message, "within all its bounds"
    names = (message.cell, message.process, message.query_id)
    assert names == (question.cell, question.process, question.query_id)
    return [one.instance_uuid for one in message.instances], [one.host_uuid for one in message.fences], message.last


def test_a_page_has_the_fences_of_its_range() -> None:
    assert filled(ask(), some(1, 4, last=4), (2, 4, 5)) == ([uuid(1), uuid(4)], [uuid(2), uuid(4)], uuid(4))
    assert filled(ask(after=4), some(6), (5, 2, 9)) == ([uuid(6)], [uuid(5), uuid(9)], "")


def test_more_fences_than_a_page_may_have_end_it_earlier() -> None:
    instances, hosts, last = filled(ask(), some(3, MAX_KNOWN + 3), range(1, MAX_KNOWN + 9))
    assert (instances, len(hosts), last) == ([uuid(3)], MAX_KNOWN, uuid(MAX_KNOWN))
    assert filled(ask(after=MAX_KNOWN), some(MAX_KNOWN + 3), range(1, MAX_KNOWN + 9))[1:] == (
        [uuid(n) for n in range(MAX_KNOWN + 1, MAX_KNOWN + 9)],
        "",
    )


def test_a_page_ends_before_it_is_too_large_and_its_fences_with_it() -> None:
    size = 60_000
    instances, hosts, last = filled(ask(), some(*range(1, 21)), (2, 15), drive=size)
    assert 1 < len(instances) <= MAX_KNOWN_BYTES // size
    assert (hosts, last) == ([uuid(2)], instances[-1])


def test_what_is_larger_than_a_page_may_be_is_sent_alone() -> None:
    """Else no answer would ever be whole."""
    page = KnownPage(ask(), some(1, 2), [])
    huge = InstanceSpec(instance_uuid=uuid(1), project_id="p", name="x" * (MAX_KNOWN_BYTES + 1))
    for n in (1, 2):
        page.add(KnownRecord(instance_uuid=uuid(n), spec=huge))
    assert ([one.instance_uuid for one in page.message().instances], page.message().last) == ([uuid(1)], uuid(1))


def test_of_instances_that_are_asked_for_no_fence_is_told() -> None:
    assert filled(ask(asked=(1, 9)), some(1, 9), (2,)) == ([uuid(1), uuid(9)], [], "")
    instances, _, last = filled(ask(asked=range(1, 21)), some(*range(1, 21)), drive=60_000)
    assert last == instances[-1] and len(instances) < 20


# --- one instance


A, H, POOL, M1, M2 = (uuid(n) for n in (1, 2, 3, 0x10, 0x20))
CONFIG = SchedulerConfig(flavors={"small": Flavor(vcpus=1, disk_gb=5), "large": Flavor(vcpus=4, disk_gb=9)})
REQUEST = BuildRequest(
    instance_uuid=A, project_id="p", flavor="small", image="i", image_source=ImageSource(source="http://images/i")
)


def host_of(name: str) -> KnownPlace | None:
    if name == POOL:
        return None
    return KnownPlace(host_uuid=name, host=f"host {name[:8]}", service="s1", allocations={})


def held(consumer: str, *hosts: str, attempt: int = 0, project: str = "p") -> ConsumerRecord:
    holding = {name: {"VCPU": 1} for name in hosts}
    return ConsumerRecord(
        consumer=consumer, project_id=project, attempt=attempt, consumer_generation=1, allocations=holding, hosts=hosts
    )


def build_of(state: BuildState = BuildState.ACTIVE, cell: str | None = "c1", **more: Any) -> RecordedBuild:
    return RecordedBuild(instance_uuid=A, project_id="p", state=state, sequence=9, cell=cell, **more)


def moved(request_id: str, kind: ActionKind = ActionKind.MIGRATE) -> RecordedAction:
    return RecordedAction(
        request_id=request_id,
        instance_uuid=A,
        project_id="p",
        kind=kind,
        digest=b"",
        state=ActionState.SCHEDULED,
        sequence=2,
    )


def told(
    build: RecordedBuild | None, *holding: ConsumerRecord, actions: Sequence[RecordedAction] = (), name: str = A
) -> KnownRecord:
    known = ActionContext(build=build, build_request=None if build is None else REQUEST)
    found = known_record(name, InstanceSources(known, actions, {one.consumer: one for one in holding}), host_of, CONFIG)
    assert msgspec.json.decode(encode(found), type=KnownRecord) == found, "within all its bounds"
    return found


def test_a_uuid_that_nobody_has() -> None:
    assert told(None) == KnownRecord(instance_uuid=A)


@pytest.mark.parametrize("state", list(BuildState))
def test_a_build_is_told_in_whatever_state(state: BuildState) -> None:
    found = told(build_of(state, attempt=2))
    assert (found.state, found.cell, found.attempt, found.sequence, found.project_id) == (state, "c1", 2, 9, "p")
    assert found.spec is not None and (found.spec.flavor, found.spec.root_gb) == ("small", 5)
    assert (found.spec.image, found.spec.image_source) == ("i", REQUEST.image_source)


def test_what_has_come_from_another_cell_is_told_with_the_first_attempt_that_it_may_have_here() -> None:
    """Neither its build nor placement has one above those of the former cell yet, which would take it for its own."""
    assert told(build_of(attempt=1, instance=SinceBuild(first_attempt=6))).attempt == 6
    assert told(build_of(attempt=8, instance=SinceBuild(first_attempt=6))).attempt == 8


@pytest.mark.parametrize(
    ("command", "arrives"),
    [
        (
            CellTransferOut(
                request_id=M1, instance_uuid=A, project_id="p", kind=ActionKind.MIGRATE, to_cell="c2", attempt=1
            ),
            False,
        ),
        (CellAction(request_id=M1, instance_uuid=A, project_id="p", kind=ActionKind.MIGRATE), True),
    ],
)
def test_what_its_former_cell_has_given_up_arrives(command: CellTransferOut | CellAction, arrives: bool) -> None:
    build = CellAction(request_id=M1, instance_uuid=A, project_id="p", kind=ActionKind.MIGRATE)
    leads = replace(moved(M1), transfer=Transfer(home="c1", away="c2", build=build, command=command))
    at = SinceBuild(under_way=M1)
    assert told(build_of(instance=at), actions=[leads]).transferred_in is arrives
    assert not told(build_of(instance=at), actions=[moved(M1)]).transferred_in


def test_the_spec_is_the_present_one() -> None:
    """The source of an image that a rebuild gave it is known to its cell alone."""
    found = told(build_of(instance=SinceBuild(condition=Condition.SHELVED, flavor="large", image="new", snapshot="s")))
    assert found.spec is not None and (found.condition, found.snapshot) == (Condition.SHELVED, "s")
    assert (found.spec.flavor, found.spec.root_gb) == ("large", 9)
    assert (found.spec.image, found.spec.image_source) == ("new", None)
    gone = told(build_of(instance=SinceBuild(flavor="deleted")))
    assert gone.spec is not None and (gone.spec.flavor, gone.spec.root_gb) == ("deleted", 0)


def test_both_sides_of_a_move_are_told_its_own_first() -> None:
    build = build_of(attempt=1, instance=SinceBuild(condition=Condition.MOVING, under_way=M2))
    found = told(build, held(M2, uuid(8)), held(A, H, attempt=3), actions=[moved(M2, ActionKind.RESIZE), moved(M1)])
    assert [(one.host_uuid, one.migration) for one in found.places] == [(H, None), (uuid(8), M2)]
    assert [one.allocations for one in found.places] == [{H: {"VCPU": 1}}, {uuid(8): {"VCPU": 1}}]
    assert (found.attempt, found.request_id, found.kind) == (3, M2, ActionKind.RESIZE)


def test_a_source_that_awaits_a_confirm_is_told_without_a_request_under_way() -> None:
    build = build_of(instance=SinceBuild(condition=Condition.RESIZED))
    found = told(build, held(A, H), held(M1, uuid(8)), actions=[moved(M1)])
    assert [one.migration for one in found.places] == [None, M1]
    assert (found.request_id, found.kind) == ("", None)


def test_an_instance_that_was_built_under_the_id_of_a_move_is_no_source_of_it() -> None:
    build = build_of(instance=SinceBuild(condition=Condition.RESIZED))
    found = told(build, held(A, H, attempt=2), held(M1, uuid(8), attempt=1), actions=[moved(M1)])
    assert [one.host_uuid for one in found.places] == [H]


def test_a_move_under_way_of_which_no_record_is_left_is_named() -> None:
    found = told(build_of(instance=SinceBuild(under_way=M1)))
    assert (found.request_id, found.kind) == (M1, None)


def test_what_is_held_of_a_pool_is_told_with_its_host() -> None:
    found = told(build_of(), held(A, H, POOL, attempt=1))
    (place,) = found.places
    assert (place.host_uuid, set(place.allocations)) == (H, {H, POOL})


def test_of_a_consumer_that_no_build_has_the_holder_is_told() -> None:
    found = told(None, held(A, H, attempt=4, project="theirs"))
    assert (found.state, found.project_id, found.attempt, found.spec) == (None, "theirs", 4, None)
    assert [one.host_uuid for one in found.places] == [H]


def test_another_clients_consumer_of_any_size_and_name_fits_into_a_page() -> None:
    """Placement's other clients write what they like: a page that cannot be read is never answered."""
    hosts = tuple(uuid(n) for n in range(100, 100 + 2 * MAX_PROVIDERS))
    found = told(None, replace(held(A, *hosts), project_id="a project, with a name of its own"))
    assert len(found.places) == MAX_PLACES
    assert {len(one.allocations) for one in found.places} == {MAX_PROVIDERS}
