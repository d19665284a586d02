"""Nova's hosts in the scheduler's host table."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_worker.nova.facts import NovaAggregate, supported_instances
from tests.unit.nova.facts_kit import CELL1, CELL2, World, down, node, up, uuid_of
from tests.unit.scheduler.hosts import PLENTY, Hosts


def test_a_nova_compute_is_a_service_and_its_nodes_are_hosts() -> None:
    world = World(node(1, "häst 1"), node(2, "häst 1"), node(3))
    assert world.states() == {
        uuid_of(1): ("häst 1", False, True),
        uuid_of(2): ("häst 1", False, True),
        uuid_of(3): ("host3", False, True),
    }
    assert world.facts.nodes_named("häst 1") == (uuid_of(1), uuid_of(2))
    assert world.facts.nodes_named("häst 1", "node2") == world.facts.nodes_named(None, "node2") == (uuid_of(2),)
    assert world.facts.cell_of(uuid_of(3)) == CELL1 == world.table.last_cell_of(uuid_of(3))
    assert world.facts.unknown([uuid_of(3), uuid_of(4)]) == (uuid_of(4),)


def test_a_service_is_up_down_disabled_and_gone() -> None:
    world = World(node(1), node(2))
    for service, expected in (
        (down("host1"), (None, True, True)),
        (up("host1", is_disabled=True, reason="fan"), ("host1", False, False)),
        (up("host1"), ("host1", False, True)),
    ):
        world.facts.put_services([service, up("host2")], complete=True)
        world.facts.announce(1.0)
        assert world.states() == {uuid_of(1): expected, uuid_of(2): ("host2", False, True)}
    world.facts.put_services([up("host2")], complete=True)
    world.facts.announce(2.0)
    assert world.states()[uuid_of(1)][0] is None
    world.facts.put_services([up("host1")], complete=False)
    world.facts.announce(3.0)
    assert world.states()[uuid_of(1)] == ("host1", False, True), "it is back"


def test_what_has_not_changed_is_not_announced_again() -> None:
    """A revision of the host table makes every ranking anew."""
    world = World(node(1), node(2))
    before = world.table.revision, world.facts.version
    world.facts.put_services([up("host1"), up("host2")], complete=True)
    world.facts.put_nodes([node(2), node(1)], complete=True)
    world.facts.announce(1.0)
    assert (world.table.revision, world.facts.version) == before


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_nodes_change_places_between_services(first: str, second: str) -> None:
    """Ironic's nodes go from one nova-compute to another, which may be announced first."""
    world = World(node(1, first), node(2, second))
    world.facts.put_nodes([node(1, second), node(2, first)], complete=True)
    world.facts.announce(1.0)
    assert {uuid: state[0] for uuid, state in world.states().items()} == {uuid_of(1): second, uuid_of(2): first}


def test_a_host_without_a_cell_is_not_announced_and_one_may_change_it() -> None:
    world = World(node(1), node(2), cells={"host1": CELL1})
    assert world.states().keys() == {uuid_of(1)} and world.facts.without_cell() == ("host2",)
    world.facts.put_cells({"host1": CELL2, "host2": CELL2})
    world.facts.announce(1.0)
    assert {uuid: state[0] for uuid, state in world.states().items()} == {uuid_of(1): "host1", uuid_of(2): "host2"}
    assert world.table.last_cell_of(uuid_of(1)) == CELL2


def test_nodes_of_a_service_that_is_down_stay_although_nova_does_not_list_them() -> None:
    """Nova leaves out what is in a cell that it cannot reach."""
    world = World(node(1), node(2), node(3))
    world.facts.put_services([down("host1"), up("host2"), up("host3")], complete=True)
    world.facts.put_nodes([node(2)], complete=True)
    world.facts.announce(1.0)
    assert world.facts.nodes_named("host1") == (uuid_of(1),) and world.facts.nodes_named("host3") == ()
    assert world.states()[uuid_of(3)][0] is None and world.facts.without_nodes() == {"host3"}


def test_filters_run_on_nova_s_aggregates_by_nova_s_members() -> None:
    """The book's provider aggregates may lag behind, or be missing."""
    hosts = Hosts([PLENTY] * 3, members={"ssd": [0]})
    uuids = [hosts.book.uuid_of(row) for row in hosts.view().rows.tolist()]
    nodes = [node(1, "h1"), node(2, "h2"), node(3, "h3")]
    world = World()
    world.facts.put_nodes(
        [type(one)(uuid=uuid, host=one.host, nodename=one.nodename) for uuid, one in zip(uuids, nodes, strict=True)],
        complete=True,
    )
    ssd = NovaAggregate(uuid="ssd", name="ssd", metadata={"availability_zone": "z", "ssd": "true"}, hosts=("h2", "h9"))
    world.facts.put_aggregates([ssd], complete=True)
    hosts.selector.membership = world.facts.membership()
    view = hosts.selector.all_hosts()
    assert [bool(one) for one in view.member_of("ssd")] == [False, True, False]
    assert [one.name for one in view.membership.with_key("ssd")] == ["ssd"]
    before = world.facts.version
    world.facts.put_aggregates([ssd], complete=False)
    assert world.facts.version == before
    world.facts.drop_aggregate("ssd")
    assert world.facts.aggregates() == () and world.facts.version == before + 1


def test_capabilities_that_a_flavor_may_name() -> None:
    info = {"arch": "x86_64", "topology:cores": "8", "features": "['aes', 'avx']"}
    world = World(node(1, hypervisor_type="QEMU", hypervisor_version=8_000_000, host_ip="192.0.2.1", cpu_info=info))
    attributes = world.table.attributes[0]
    assert attributes == {
        "host": "host1",
        "nodename": "node1",
        "hypervisor_hostname": "node1",
        "hypervisor_type": "QEMU",
        "hypervisor_version": "8000000",
        "host_ip": "192.0.2.1",
        "supported_instances": "x86_64/kvm/hvm, x86_64/qemu/hvm, i686/kvm/hvm, i686/qemu/hvm",
        "cpu_info:arch": "x86_64",
        "cpu_info:topology:cores": "8",
        "cpu_info:features": "['aes', 'avx']",
    }
    assert np.all(world.table.project[:1] == -1)


@pytest.mark.parametrize(
    ("kind", "arch", "expected"),
    [
        ("QEMU", "x86_64", "x86_64/kvm/hvm, x86_64/qemu/hvm, i686/kvm/hvm, i686/qemu/hvm"),
        ("LXC", "s390x", "s390x/lxc/exe"),
        ("ironic", "", "*/baremetal/hvm"),
        ("of another", "AARCH64", "aarch64/*/*, armv7l/*/*"),
        ("", "", "*/*/*"),
    ],
)
def test_what_runs_on_a_host(kind: str, arch: str, expected: str) -> None:
    one = node(1, hypervisor_type=kind, cpu_info={"arch": arch} if arch else {})
    assert supported_instances(one) == expected
    assert World(one).facts.supported() == {expected}
