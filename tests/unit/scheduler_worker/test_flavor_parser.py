"""What flavors ask for, and what they get on trees of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bus.contracts.placement import ClaimOption, ProviderState
from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.selection.choice import MAX_OPTIONS, Choice
from scheduler_worker.selection.explain import NoValidHost, message_of
from tests.unit.scheduler_worker.hosts import Hosts

SHARES = "MISC_SHARES_VIA_AGGREGATE"
ROOM = {"VCPU": 8, "MEMORY_MB": 8192, "DISK_GB": 100}


def child(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


class Cluster:
    """Hosts h0, h1, ... of equal room, with children and shared providers added by hand, and one flavor."""

    def __init__(
        self,
        count: int,
        flavor: Flavor,
        *,
        room: Mapping[str, int] = ROOM,
        members: Mapping[str, Sequence[int]] | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        self.hosts = Hosts([room] * count, config=config or SchedulerConfig(flavors={"f": flavor}), members=members)
        self.names = {uuid: f"h{at}" for at, uuid in enumerate(self.hosts.uuids)}
        self.claims = 0

    def add(
        self,
        number: int,
        amounts: Mapping[str, int],
        *,
        host: int | None = None,
        parent: int | None = None,
        traits: tuple[str, ...] = (),
        aggregates: tuple[str, ...] = (),
    ) -> None:
        """A child of a host (under its root, or under another child), or a provider of its own."""
        root = child(number) if host is None else self.hosts.uuids[host]
        above = root if parent is None else child(parent)
        self.hosts.states.append(
            ProviderState(
                uuid=child(number),
                name=f"c{number}",
                root_uuid=root,
                parent_uuid=None if host is None else above,
                generation=1,
                spec_generation=number,
                inventories={name: (float(n), 1, n, 1, n, 0, 1.0) for name, n in amounts.items()},
                traits=traits,
                aggregates=aggregates,
            )
        )
        self.names[child(number)] = f"c{number}"
        self.hosts.replica.load(self.hosts.states, 0)

    def choice(self) -> Choice | None:
        selector = self.hosts.selector
        return selector.rank(self.hosts.spec("f"), self.hosts.rng).pick({}, subset=1, alternates=2)

    def allocations(self, option: ClaimOption) -> dict[str, dict[str, int]]:
        return {self.names[uuid]: dict(amounts) for uuid, amounts in option.allocations.items()}

    def place(self) -> dict[str, dict[str, int]] | None:
        """Choose and claim; what was claimed."""
        choice = self.choice()
        if choice is None:
            return None
        self.claims += 1
        self.hosts.replica.assume(f"k{self.claims}", choice.selected.options[0].allocations)
        return self.allocations(choice.selected.options[0])

    def why_not(self) -> str:
        spec = self.hosts.spec("f")
        no_host = self.hosts.selector.explain(spec, {})
        assert isinstance(no_host, NoValidHost)
        return message_of(spec, no_host.funnel, 3)


def test_two_nics_one_passed_through_whole_one_carved() -> None:
    """SR-IOV: a PF is a provider of one PF and its VFs; who takes the PF wants its device for itself."""
    flavor = Flavor(
        vcpus=2,
        extra_specs={
            "resources1:CUSTOM_PF": "1",
            "trait1:CUSTOM_PHYSNET_A": "required",
            "resources2:SRIOV_NET_VF": "1",
            "trait2:CUSTOM_PHYSNET_A": "required",
            "group_policy": "isolate",
        },
    )
    cluster = Cluster(2, flavor)
    for host in (0, 1):
        first = 10 * (host + 1)
        cluster.add(first, {"CUSTOM_PF": 1, "SRIOV_NET_VF": 4}, host=host, traits=("CUSTOM_PHYSNET_A",))
        # Only the second host has two devices on the right network.
        network = "CUSTOM_PHYSNET_A" if host else "CUSTOM_PHYSNET_B"
        cluster.add(first + 1, {"CUSTOM_PF": 1, "SRIOV_NET_VF": 4}, host=host, traits=(network,))
    placed = cluster.place()
    assert placed is not None
    assert placed["h1"] == {"VCPU": 2}
    assert sorted(amounts for name, given in placed.items() if name != "h1" for amounts in given) == [
        "CUSTOM_PF",
        "SRIOV_NET_VF",
    ]
    assert cluster.place() is not None  # the other PF, and a VF of the first device
    assert cluster.place() is None
    assert "have no provider with enough free for group 1" in cluster.why_not()


def test_virtual_gpus_run_out_device_by_device() -> None:
    flavor = Flavor(vcpus=1, extra_specs={"resources_GPU:VGPU": "2", "trait_GPU:in:CUSTOM_A,CUSTOM_B": "required"})
    cluster = Cluster(1, flavor)
    cluster.add(1, {"VGPU": 3}, host=0, traits=("CUSTOM_A",))
    cluster.add(2, {"VGPU": 2}, host=0, traits=("CUSTOM_B",))
    cluster.add(3, {"VGPU": 8}, host=0, traits=("CUSTOM_C",))
    given = [cluster.place() for _ in range(3)]
    assert given[:2] == [{"h0": {"VCPU": 1}, "c1": {"VGPU": 2}}, {"h0": {"VCPU": 1}, "c2": {"VGPU": 2}}]
    assert given[2] is None


def numa_cluster(room: tuple[int, int]) -> Cluster:
    """Two NUMA cells with a device each; how many CPUs each cell has is given."""
    flavor = Flavor(
        disk_gb=10,
        extra_specs={
            "resources_CPU:VCPU": "4",
            "resources_CPU:MEMORY_MB": "1024",
            "resources_NIC:SRIOV_NET_VF": "1",
            "same_subtree": "_CPU,_NIC",
            "group_policy": "none",
        },
    )
    cluster = Cluster(1, flavor, room={"DISK_GB": 100})
    for cell, cpus in enumerate(room):
        cluster.add(10 + cell, {"VCPU": cpus, "MEMORY_MB": 4096}, host=0, traits=("HW_NUMA_ROOT",))
        cluster.add(20 + cell, {"SRIOV_NET_VF": 1 + cell}, host=0, parent=10 + cell)
    return cluster


def test_cpus_memory_and_a_device_stay_in_one_numa_cell() -> None:
    cluster = numa_cluster((4, 8))
    cells = []
    while (placed := cluster.place()) is not None:
        assert placed["h0"] == {"DISK_GB": 10}
        (cell,) = [name for name, given in placed.items() if "VCPU" in given]
        (device,) = [name for name, given in placed.items() if "SRIOV_NET_VF" in given]
        assert placed[cell] == {"VCPU": 4, "MEMORY_MB": 1024}
        assert (cell, device) in {("c10", "c20"), ("c11", "c21")}
        cells.append(cell)
    assert sorted(cells) == ["c10", "c11", "c11"]
    assert "have no provider with enough free for group CPU" in cluster.why_not()


def test_no_cell_has_both() -> None:
    cluster = numa_cluster((4, 2))
    assert cluster.place() is not None  # cell 0 has both
    assert cluster.place() is None  # CPUs are gone there, and the free device is in the other cell
    assert "have no provider with enough free for group NIC" not in cluster.why_not()


def test_storage_shared_by_aggregate() -> None:
    room = {"VCPU": 8, "MEMORY_MB": 8192}
    cluster = Cluster(3, Flavor(vcpus=1, memory_mb=64, disk_gb=60), room=room, members={"rack": (0, 1)})
    cluster.add(90, {"DISK_GB": 150}, traits=(SHARES,), aggregates=("rack",))
    for _ in range(2):
        placed = cluster.place()
        assert placed is not None
        (host,) = placed.keys() - {"c90"}
        assert host in {"h0", "h1"}
        assert placed == {host: {"VCPU": 1, "MEMORY_MB": 64}, "c90": {"DISK_GB": 60}}
    assert cluster.place() is None
    assert "have too little DISK_GB free" in cluster.why_not()


def test_an_address_from_the_pool_of_a_routed_network() -> None:
    """Two segments, each with its own pool: the pool that serves the host's segment gives the address."""
    flavor = Flavor(vcpus=1, extra_specs={"resources_NET:IPV4_ADDRESS": "1"})
    cluster = Cluster(2, flavor, members={"segment0": (0,), "segment1": (1,)})
    cluster.add(80, {"IPV4_ADDRESS": 2}, traits=(SHARES,), aggregates=("segment0",))
    cluster.add(81, {"IPV4_ADDRESS": 1}, traits=(SHARES,), aggregates=("segment1",))
    placed = []
    while (one := cluster.place()) is not None:
        placed.append(one)
    assert len(placed) == 3
    for one in placed:
        assert one.keys() in ({"h0", "c80"}, {"h1", "c81"})


def test_minimum_bandwidth_on_a_port() -> None:
    """One port requires both directions of one interface on its network; two ports may share an interface."""
    port = {"CUSTOM_NET_BW_EGR": "3", "CUSTOM_NET_BW_IGR": "3"}
    words = {f"resources_PORT{n}:{name}": amount for n in (1, 2) for name, amount in port.items()}
    words |= {"trait_PORT1:CUSTOM_PHYSNET_A": "required", "group_policy": "none"}
    cluster = Cluster(1, Flavor(vcpus=1, extra_specs=words))
    bandwidth = {"CUSTOM_NET_BW_EGR": 6, "CUSTOM_NET_BW_IGR": 6}
    cluster.add(1, bandwidth, host=0, traits=("CUSTOM_PHYSNET_A",))
    cluster.add(2, {**bandwidth, "CUSTOM_NET_BW_EGR": 3}, host=0, traits=("CUSTOM_PHYSNET_B",))
    first = cluster.place()
    assert first is not None
    given = [(name, amounts) for name, amounts in first.items() if name != "h0"]
    sums = {name: sum(amounts[name] for _, amounts in given) for name in bandwidth}
    assert sums == {"CUSTOM_NET_BW_EGR": 6, "CUSTOM_NET_BW_IGR": 6}
    assert "c1" in first  # the first port's network
    assert cluster.place() is None  # one port's worth of egress is left, and two are asked


@pytest.mark.parametrize("wish", [{"trait:CUSTOM_NICE": "preferred"}, {"resources:VGPU": "preferred"}])
def test_a_wish_is_weighed_and_is_not_an_order(wish: dict[str, str]) -> None:
    """The host that meets it is taken though others have more room; when it is full, the others do."""
    flavor = Flavor(vcpus=2, memory_mb=64, extra_specs=wish)
    cluster = Cluster(3, flavor)
    cluster.add(1, {"VGPU": 1}, host=2, traits=("CUSTOM_NICE",))
    cluster.hosts.replica.assume("busy", {cluster.hosts.uuids[2]: {"VCPU": 2, "MEMORY_MB": 4096}})
    taken = [cluster.place() for _ in range(4)]
    assert [next(iter(one)) for one in taken if one][:3] == ["h2", "h2", "h2"]
    assert taken[3] is not None and "h2" not in taken[3]


def test_alternates_and_options_of_groups_are_real_alternatives() -> None:
    cluster = Cluster(3, Flavor(vcpus=1, extra_specs={"resources1:VGPU": "1"}))
    for host in range(3):
        for device in range(4):
            cluster.add(10 * host + device + 1, {"VGPU": 1}, host=host)
    choice = cluster.choice()
    assert choice is not None
    assert len({cluster.hosts.replica.uuid_of(one.row) for one in (choice.selected, *choice.alternates)}) == 3
    devices = [tuple(sorted(cluster.allocations(option))) for option in choice.selected.options]
    assert len(set(devices)) == MAX_OPTIONS


def test_a_zone_holds_for_flavors_of_groups_alone_and_not_for_the_pool() -> None:
    zone = Aggregate(uuid=child(500), name="z", metadata={"availability_zone": "z1"})
    flavor = Flavor(extra_specs={"resources1:VGPU": "1", "resources_DISK:DISK_GB": "5", "group_policy": "none"})
    config = SchedulerConfig(flavors={"f": flavor}, aggregates=(zone,))
    cluster = Cluster(3, flavor, room={"VCPU": 8}, members={child(500): (1,), "rack": (0, 1, 2)}, config=config)
    for host in range(3):
        cluster.add(host + 1, {"VGPU": 4}, host=host)
    cluster.add(90, {"DISK_GB": 150}, traits=(SHARES,), aggregates=("rack",))
    selector = cluster.hosts.selector
    for name, hosts in (("z1", {"h1"}), ("nova", {"h0", "h2"})):
        ranking = selector.rank(cluster.hosts.spec("f", availability_zone=name), cluster.hosts.rng)
        assert {cluster.hosts.name(int(row)) for row in ranking.view.rows} == hosts
        choice = ranking.pick({}, subset=1, alternates=0)
        assert choice is not None
        assert cluster.allocations(choice.selected.options[0])["c90"] == {"DISK_GB": 5}
