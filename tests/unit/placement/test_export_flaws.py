"""Books from outside: what cannot be one is refused in a sentence, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import ConsumerState, Provider, StoredInventory
from placement_worker.operations.export import BookExport, InvalidExport, checked, lines, parse

A, B, C = (f"0000000{number}-0000-4000-8000-000000000000" for number in (1, 2, 3))
INVENTORY = StoredInventory(8, 0, 1, 8, 1, 2.0, 16)
HOST = Provider(A, "host ü☃", None, A, 1, 1, {"VCPU": INVENTORY}, {}, ("HW_CPU_X86_VMX",), (C,))
HOLDER = ConsumerState(1, 0, "gone project", "u", "INSTANCE", {A: {"VCPU": 4}})

MEMBER = GroupMember("p", C, B)


def book(**changes: Any) -> BookExport:
    host = replace(HOST, **changes)
    return BookExport(frozenset(), frozenset(), {host.uuid: host}, {})


def joined(**changes: Any) -> BookExport:
    return replace(held(), members=frozenset({replace(MEMBER, **changes)}))


def held(**changes: Any) -> BookExport:
    return BookExport(frozenset(), frozenset(), {A: HOST}, {changes.pop("uuid", B): replace(HOLDER, **changes)})


@pytest.mark.parametrize(
    "bad",
    [
        book(uuid="x", root="x"),
        book(uuid=A.replace("1", "a").upper(), root=A.replace("1", "a").upper()),
        book(parent="x"),
        book(name=""),
        book(name="a\x00b"),
        book(name="n" * 300),
        book(generation=-1),
        book(generation=2**80),
        book(traits=("lower",)),
        book(traits=("CUSTOM_A\n",)),
        book(aggregates=("x",)),
        book(inventories={"vcpu": INVENTORY}),
        book(inventories={"VCPU": replace(INVENTORY, total=0)}),
        book(inventories={"VCPU": replace(INVENTORY, total=2**31)}),
        book(inventories={"VCPU": replace(INVENTORY, reserved=-1)}),
        book(inventories={"VCPU": replace(INVENTORY, min_unit=0)}),
        book(inventories={"VCPU": replace(INVENTORY, step_size=0)}),
        book(inventories={"VCPU": replace(INVENTORY, capacity=2**70)}),
        held(uuid="x"),
        held(generation=-1),
        held(attempt=2**40),
        held(project_id=""),
        held(user_id="a\x00"),
        held(consumer_type="instance"),
        held(holding={}),
        held(holding={A: {"VCPU": 0}}),
        held(holding={A: {"VCPU": -4}}),
        held(holding={A: {"VCPU": 2**70}}),
        held(holding={B: {"VCPU": 1}}),
        held(holding={A: {"DISK_GB": 1}}),
        joined(project=""),
        joined(group="x"),
        joined(consumer=C),
        BookExport(frozenset({"custom_x"}), frozenset(), {}, {}),
        BookExport(frozenset(), frozenset({""}), {}, {}),
        BookExport(frozenset(), frozenset(), {A: HOST, B: replace(HOST, uuid=B, root=B)}, {}),
    ],
)
def test_what_is_no_book_is_refused_with_its_reason(bad: BookExport) -> None:
    with pytest.raises(InvalidExport):
        checked(bad)


def test_unusual_books_are_books() -> None:
    full = replace(INVENTORY, reserved=8, capacity=0)
    closed = replace(INVENTORY, stranded=True, reserved=8, capacity=0)
    over = replace(INVENTORY, total=1, reserved=2, allocation_ratio=0.05, capacity=0)
    for inventory in (full, closed, over):
        good = BookExport(
            frozenset({"CUSTOM_X"}), frozenset(), {A: replace(HOST, inventories={"VCPU": inventory})}, {B: HOLDER}
        )
        assert checked(good) == good
    assert checked(held(consumer_type="")).consumers[B].consumer_type == ""


@pytest.mark.parametrize(("inventory", "capacity"), [(INVENTORY, 16), (replace(INVENTORY, stranded=True), 0)])
def test_a_capacity_that_does_not_follow_from_the_rest_is_counted_anew(
    inventory: StoredInventory, capacity: int
) -> None:
    edited = checked(book(inventories={"VCPU": replace(inventory, capacity=10_000)}))
    assert edited.providers[A].inventories["VCPU"].capacity == capacity


HOSTILE = {
    "not UTF-8": b'{"resource_class":"\xff"}',
    "a name that is not UTF-8": b'{"\xff":1}',
    "nested without end": b'{"x":' + b"[" * 100_000,
    "of other types": b'{"provider":[]}',
    "empty": b"",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("number", [0, 1], ids=["the first line", "a later one"])
def test_hostile_bytes_are_no_book_and_the_error_names_the_line(line: bytes, number: int) -> None:
    rows = [*lines(book())]
    with pytest.raises(InvalidExport, match=f"line {number + 1}"):
        parse([*rows[:number], line, *rows[number:]])
