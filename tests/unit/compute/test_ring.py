"""Which service of a ring has which free node."""

from __future__ import annotations

from collections import Counter

from bus.contracts.cell import RingMembers
from compute_sim.ring import Ring, owner_of

NODES = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(3_000)]
FEW = ("m1", "m2", "m3")
MORE = (*FEW, "m4")


def members(*services: str, term: int = 1, number: int = 1, ring: str = "r") -> RingMembers:
    return RingMembers(cell="c1", ring=ring, term=term, number=number, members=services)


def test_nodes_are_spread_evenly_whatever_the_order_of_the_members() -> None:
    counts = Counter(owner_of(node, MORE) for node in NODES)
    assert set(counts) == set(MORE) and min(counts.values()) > 0.8 * len(NODES) / len(MORE)
    assert all(owner_of(node, MORE) == owner_of(node, tuple(reversed(MORE))) for node in NODES)
    assert owner_of(NODES[0], ()) is None


def test_one_more_or_one_less_moves_its_own_nodes_and_no_others() -> None:
    before = {node: owner_of(node, FEW) for node in NODES}
    after = {node: owner_of(node, MORE) for node in NODES}
    moved = [node for node in NODES if before[node] != after[node]]
    assert all(after[node] == "m4" for node in moved)
    assert 0.8 < len(moved) / (len(NODES) / len(MORE)) < 1.2


def test_all_that_go_by_one_membership_have_each_node_once() -> None:
    rings = [Ring("r", service) for service in MORE]
    for ring in rings:
        assert not any(ring.owns(node) for node in NODES), "before it knows the members it has none"
        assert ring.apply(members(*MORE))
    assert all(sum(ring.owns(node) for ring in rings) == 1 for node in NODES)


def test_an_older_membership_and_another_rings_change_nothing() -> None:
    ring = Ring("r", "m1")
    assert ring.apply(members("m1", number=2)) and ring.changed.is_set()
    ring.changed.clear()
    for old in (members("m1", "m2"), members("m1", "m2", number=2), members("m2", term=9, ring="other")):
        assert not ring.apply(old)
    assert all(ring.owns(node) for node in NODES) and not ring.changed.is_set()
    assert not ring.apply(members("m1", term=2)) and ring.version == (2, 1), "the same members, of a new keeper"
    assert ring.apply(members("m1", "m2", term=2, number=2))
    assert 0 < sum(ring.owns(node) for node in NODES) < len(NODES)


def test_what_is_remembered_of_nodes_is_bounded() -> None:
    ring = Ring("r", "m1")
    ring.apply(members("m1", "m2"))
    for number in range(100_001):
        ring.owns(str(number))
    assert len(ring._owned) <= 100_000
