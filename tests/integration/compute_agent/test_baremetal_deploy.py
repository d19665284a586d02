"""The data that a bare-metal build gives Ironic, its end when a node or an earlier attempt prevents it, and changes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from bus.contracts.actions import MACHINE_ABSENT, RESCUE_FAILED, ChangeKind
from bus.contracts.build import BuildRequest
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ConfigDrive, ImageSource, NetworkRequest, VolumeRequest
from compute_agent.driver import (
    BuildAbort,
    ChangeFault,
    ChangeOrder,
    DriverUnavailable,
    MachineProtected,
    NotOwned,
    Reschedule,
)
from tests.integration.compute_agent.harness import (
    DATABASE_ID,
    FAILING,
    INSTANCE,
    QUICK,
    Driver,
    Metal,
    Way,
    build,
    fault,
)
from tests.kit.waiting import until

PORT = "90000000-0000-4000-8000-000000000000"
DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
IMAGE = ImageSource(source="http://images/debian.qcow2", hash_algorithm="sha256", hash_value=DIGEST, type="whole-disk")


async def test_ironic_receives_what_to_deploy(metal: Metal) -> None:
    requested = build(
        metal.first,
        name="web 1",
        image_source=IMAGE,
        root_gb=50,
        traits=("CUSTOM_RAID",),
        capabilities={"boot_mode": "uefi"},
        config_drive=ConfigDrive(
            user_data="#cloud-config\n", public_keys=("ssh-ed25519 AAAA me",), network_data={"links": []}
        ),
    )
    await metal.deployed(requested)
    assert {name: value for name, value in metal.node["instance_info"].items() if name != "berth"} == {
        "project_id": "acme",
        "display_name": "web 1",
        "root_gb": 50,
        "traits": ["CUSTOM_RAID"],
        "capabilities": {"boot_mode": "uefi"},
        "image_source": "http://images/debian.qcow2",
        "image_os_hash_algo": "sha256",
        "image_os_hash_value": DIGEST,
        "image_type": "whole-disk",
    }
    drive = metal.pool.config_drives[metal.first]
    assert drive["user_data"] == "#cloud-config\n" and drive["network_data"] == {"links": []}
    assert drive["meta_data"]["public_keys"] == {"key0": "ssh-ed25519 AAAA me"}
    assert (drive["meta_data"]["hostname"], drive["meta_data"]["uuid"]) == ("web-1", INSTANCE)
    assert [method for method, _ in metal.requested] == ["PATCH", "PUT"], "all of it is written with the instance"


async def test_an_image_is_known_by_name_or_the_build_is_given_up(metal: Metal) -> None:
    driver = await metal.deployed(build(metal.first, image="debian-12"), images={"debian-12": IMAGE})
    assert metal.node["instance_info"]["image_source"] == IMAGE.source
    assert await fault(driver.spawn(build(metal.first, image="debian-13"))) == (BuildAbort, "image.unknown")


async def test_ironics_own_words_explain_why_a_node_was_not_deployed(metal: Metal, driver: Driver) -> None:
    metal.pool.invalid[metal.first] = "Missing are: ['driver_info.deploy_kernel']"
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(metal.first))
    invalid = ("node.invalid", "deploy: Missing are: ['driver_info.deploy_kernel']")
    assert (caught.value.code, caught.value.reason) == invalid
    assert metal.node["provision_state"] == "available", "nothing was begun"
    await driver.destroy(metal.first)
    assert metal.node["instance_uuid"] is None and metal.node["instance_info"] == {}
    metal.pool.invalid.clear()
    # A node's last error is that of its last step; why the deployment failed may be in its history alone.
    old = {"created_at": "2020-01-01T00:00:00", "severity": "ERROR", "event_type": "cleaning", "event": "of another"}
    metal.pool.history[metal.first] = [old, {**old, "created_at": None, "event": "at no time"}]
    metal.pool.behaviour = FAILING
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(metal.first, attempt=2))
    words, _, history = caught.value.reason.partition("; its history: ")
    assert words == "the node is in deploy failed: Timeout reached while waiting for callback"
    (_, _, entry) = history.partition(" ")
    assert entry == "deploying: Timeout reached while waiting for callback"


@pytest.mark.parametrize(
    "answer", [httpx.Response(404), httpx.Response(500), httpx.Response(200, text='{"history": 5}')]
)
async def test_without_a_history_a_failed_deployment_ends_as_well(metal: Metal, answer: httpx.Response) -> None:
    metal.pool.behaviour = FAILING
    driver = await metal.driver(way=Way(lambda request: answer if request.url.path.endswith("/history") else None))
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(metal.first))
    assert caught.value.code == "node.deploy_failed" and "history" not in caught.value.reason


OF_REQUEST = [
    "Cannot validate image information for node N because one or more parameters are missing from its instance_info.",
    f"Validation of image href {IMAGE.source} failed, reason: Got HTTP code 404 instead of 200 in response to HEAD",
    "Failed to prepare to deploy: The requested image is not valid for use.",
    "The supplied image checksum is invalid or does not match.",
    "Failed to prepare to deploy: Image is invalid: the checksum does not match (InvalidImage)",
    "The requested image checksum algorithm cannot be loaded.",
    "Use of remote checksum files is not supported.",
    "Deploy step failed: The provided image is not valid for use: Security: the detected format is qcow2",
    f"Image {IMAGE.source} is unacceptable: the format does not match",
    f"Image {IMAGE.source} could not be found.",
    f"Not authorized for image {IMAGE.source}.",
    f"Failed to download image {IMAGE.source}, reason: Got HTTP code 404",
    f"Invalid image href {IMAGE.source}.",
    f"The requested image {IMAGE.source} requires authentication which has not been provided. Unable to proceed.",
]
OF_THE_RAMDISK = [
    "Image http://images/ipa.kernel could not be found.",
    "Failed to download image http://images/ipa.kernel, reason: Got HTTP code 404",
]
OF_NODE = "Validation of image href http://images/ipa.kernel failed, reason: Got HTTP code 404 instead of 200"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *((words, BuildAbort) for words in OF_REQUEST),
        *((words, Reschedule) for words in (OF_NODE, *OF_THE_RAMDISK, "no IPMI")),
    ],
)
@pytest.mark.parametrize("code", ["node.invalid", "node.deploy_failed"])
async def test_what_ironic_refuses_of_the_request_is_not_tried_on_node_after_node(
    metal: Metal, driver: Driver, words: str, kind: type[Exception], code: str
) -> None:
    """Each node was cleaned and charged for an image that no node accepts."""
    if code == "node.deploy_failed":
        metal.pool.behaviour = replace(FAILING, failure=words)
    else:
        metal.pool.invalid[metal.first] = words
    assert await fault(driver.spawn(build(metal.first, image_source=IMAGE))) == (kind, code)


# --- networks


@pytest.mark.parametrize("answer", [404, 500])
async def test_a_port_that_does_not_exist_ends_the_build(metal: Metal, answer: int) -> None:
    """A fault of Ironic's own for the port was waited for like an Ironic that is away, for an hour on each node."""
    metal.pool.no_ports = {PORT: answer}
    driver = await metal.driver(network="static", ports={PORT: "acme"}, outage_timeout_s=0.1, deploy_timeout_s=60.0)
    wanted = build(metal.first, networks=(NetworkRequest(port=PORT),))
    assert await fault(driver.spawn(wanted)) == (BuildAbort, "network.refused")


async def test_a_port_whose_network_is_away_for_a_while_is_attached_later(metal: Metal) -> None:
    metal.pool.no_ports = {PORT: 503}
    driver = await metal.driver(network="static", ports={PORT: "acme"}, outage_timeout_s=60.0)
    spawning = asyncio.create_task(driver.spawn(build(metal.first, networks=(NetworkRequest(port=PORT),))))
    await until(driver.waiting)
    metal.pool.no_ports = {PORT: 500}
    await until(lambda: "500" in "".join(one.reason for one in driver.waiting()))
    metal.pool.no_ports = {}
    await spawning
    assert metal.pool.vifs[metal.first] == [PORT]


async def test_ports_are_attached_before_the_deployment_and_detached_when_it_never_began(metal: Metal) -> None:
    first, second, _ = metal.nodes
    requested: dict[str, Any] = {"networks": (NetworkRequest(port=PORT),)}
    driver = await metal.deployed(build(first, **requested), network="static", ports={PORT: "acme"})
    assert metal.pool.vifs[first] == [PORT]
    await driver.destroy(first)
    metal.pool.invalid[second] = "no"
    assert await fault(driver.spawn(build(second, attempt=2, **requested))) == (Reschedule, "node.invalid")
    assert metal.pool.vifs[second] == [PORT]
    await driver.destroy(second, attempt=2)
    assert metal.pool.vifs[second] == []


@pytest.mark.parametrize(
    ("network", "requested", "code"),
    [("none", NetworkRequest(port=PORT), "network.none"), ("static", NetworkRequest(network=PORT), "network.static")],
)
async def test_networks_that_no_node_here_can_have_end_the_build(
    metal: Metal, network: str, requested: NetworkRequest, code: str
) -> None:
    driver = await metal.driver(network=network)
    assert await fault(driver.spawn(build(metal.first, networks=(requested,)))) == (BuildAbort, code)


# --- an instance that is on another node, or a node that is taken in hand


async def test_an_alternate_waits_until_the_failed_node_has_let_go(metal: Metal, driver: Driver) -> None:
    """The alternate failed with node.taken, and the good node was charged with it: three times of three."""
    failing, good, _ = metal.nodes
    metal.pool.behaviour = replace(FAILING, undeploy_s=0.2)
    assert await fault(driver.spawn(build(failing))) == (Reschedule, "node.deploy_failed")
    metal.pool.behaviour = replace(QUICK, undeploy_s=0.2)
    await asyncio.gather(driver.destroy(failing), driver.spawn(build(good, attempt=2)))
    assert metal.nodes[good]["provision_state"] == "active"
    assert metal.nodes[failing]["instance_uuid"] is None


async def test_a_node_that_does_not_let_go_ends_the_build_and_is_named(metal: Metal) -> None:
    failing, good, _ = metal.nodes
    driver = await metal.deployed(build(failing), release_timeout_s=0.05)
    metal.nodes[failing].update(provision_state="error", last_error="the BMC does not answer")
    with pytest.raises(BuildAbort) as caught:  # final: no other node could take the instance, and none is charged
        await driver.spawn(build(good, attempt=2))
    assert caught.value.code == "node.not_released"
    assert failing in caught.value.reason and "the BMC does not answer" in caught.value.reason


async def test_an_instance_that_another_deployment_has_on_a_node_is_built_nowhere(metal: Metal, driver: Driver) -> None:
    theirs, free, _ = metal.nodes
    metal.nodes[theirs].update(instance_uuid=INSTANCE, provision_state="active")
    assert await fault(driver.spawn(build(free))) == (BuildAbort, "instance.elsewhere")
    assert metal.nodes[free]["instance_uuid"] is None


async def test_a_node_that_lets_go_between_two_reads_ends_no_build(metal: Metal, driver: Driver) -> None:
    """It was taken for another deployment's: `instance.elsewhere`, final, and the build on a good node was over."""
    failing, good, _ = metal.nodes
    await driver.spawn(build(failing))
    met = False

    def let_go(request: httpx.Request) -> None:
        """After a list has named the node as the holder."""
        nonlocal met
        if "instance_uuid" in request.url.params and not met:
            met = True
            metal.nodes[failing].update(instance_uuid=None, instance_info={}, provision_state="cleaning")

    await (await metal.driver(way=Way(after=let_go))).spawn(build(good, attempt=2))
    assert met and metal.nodes[good]["provision_state"] == "active"


async def test_a_node_that_leaves_available_under_the_take_is_given_back(metal: Metal, driver: Driver) -> None:
    node = metal.node

    def taken_in_hand(request: httpx.Request) -> None:
        """By an operator, just before a PATCH takes it."""
        if request.method == "PATCH" and node["instance_uuid"] is None:
            node.update(provision_state="manageable")

    met = await metal.driver(way=Way(taken_in_hand), clean_timeout_s=0.02)
    assert await fault(met.spawn(build(node["uuid"]))) == (Reschedule, "node.deploy_failed")
    assert node["provision_state"] == "manageable"
    with pytest.raises(DriverUnavailable, match="still carries the instance and is in manageable"):
        await met.destroy(node["uuid"])
    node.update(provision_state="available")  # its operator provides it again
    await driver.destroy(node["uuid"])
    assert node["instance_uuid"] is None and "berth" not in node["instance_info"]


async def test_a_protected_node_is_kept_and_the_reason_reported(metal: Metal, driver: Driver) -> None:
    await driver.spawn(build(metal.first))
    metal.node.update(protected=True, protected_reason="the ledger is on it")
    metal.requested.clear()
    with pytest.raises(MachineProtected, match=r"protected in Ironic \(the ledger is on it\)"):
        await driver.destroy(metal.first)
    assert not metal.requested and metal.node["provision_state"] == "active"


# --- changes of a machine


def order(node: str, kind: ChangeKind, number: int = 1, attempt: int = 1, password: str = "", **spec: Any) -> Any:
    return ChangeOrder(
        kind=kind,
        host_uuid=node,
        spec=InstanceSpec(instance_uuid=INSTANCE, project_id="acme", **spec),
        attempt=attempt,
        change_number=number,
        allocations={},
        database_id=DATABASE_ID,
        rescue_password=password,
    )


@pytest.fixture
async def built(metal: Metal, driver: Driver) -> str:
    """A node with a machine."""
    await driver.spawn(build(metal.first))
    metal.requested.clear()
    return metal.first


@pytest.mark.parametrize(
    "changes",
    [
        [
            (ChangeKind.STOP, {"power_state": "power off"}, False),
            (ChangeKind.START, {"power_state": "power on"}, True),
        ],
        [
            (ChangeKind.RESCUE, {"provision_state": "rescue"}, True),
            (ChangeKind.UNRESCUE, {"provision_state": "active"}, True),
        ],
    ],
    ids=["power", "rescue"],
)
async def test_a_machine_is_changed_and_changed_back_each_once(
    metal: Metal, driver: Driver, built: str, changes: list[tuple[ChangeKind, dict[str, object], bool]]
) -> None:
    for number, (kind, state, runs) in enumerate(changes, start=1):
        metal.requested.clear()
        for _ in range(2):  # the second time it is so already
            assert (await driver.change(order(built, kind, number, password="sesame"))).runs is runs
        assert metal.node.items() >= state.items() and len(metal.requested) == 1
        (machine,) = (await driver.list([built]))[built]
        assert (machine.attempt, machine.built, machine.runs) == (1, True, runs)


@pytest.mark.parametrize("kind", [ChangeKind.REBOOT, ChangeKind.REBOOT_SOFT])
@pytest.mark.parametrize("before", ["power on", "power off"])
async def test_a_node_is_rebooted_whatever_its_power_and_again_by_a_later_command(
    metal: Metal, driver: Driver, built: str, kind: ChangeKind, before: str
) -> None:
    metal.node["power_state"] = before
    metal.pool.behaviour = replace(QUICK, power_s=0.2)
    for number in (3, 4):
        assert (await driver.change(order(built, kind, number))).runs
        assert metal.node["power_state"] == "power on" and len(metal.requested) == number - 2


async def test_a_reboot_on_its_way_is_taken_for_that_of_a_later_command(
    metal: Metal, driver: Driver, built: str
) -> None:
    """Of a node that takes longer than the time of its command, which is given again: it is not rebooted for each."""
    metal.pool.behaviour = replace(QUICK, power_s=1.0)
    first = asyncio.create_task(driver.change(order(built, ChangeKind.REBOOT, 3)))
    await until(lambda: metal.node["target_power_state"] is not None)
    first.cancel()
    assert (await driver.change(order(built, ChangeKind.REBOOT, 4))).runs
    assert len(metal.requested) == 1 and metal.node["target_power_state"] is None


async def test_a_reboot_that_fails_is_not_done_though_the_node_is_on(metal: Metal, driver: Driver, built: str) -> None:
    metal.pool.behaviour = replace(QUICK, power_fails=True, power_s=0.2)
    with pytest.raises(ChangeFault) as caught:
        await driver.change(order(built, ChangeKind.REBOOT))
    assert (caught.value.code, caught.value.runs) == ("node.power_failed", True)


@pytest.mark.parametrize(("earlier", "ends"), [("", True), ("it did not answer yesterday", False), ("same", True)])
async def test_a_power_action_fails_of_its_own_error_alone(
    metal: Metal, driver: Driver, built: str, earlier: str, ends: bool
) -> None:
    """Ironic clears the error of an earlier action when it takes this one up, which is after it has accepted it."""
    metal.node["last_error"] = "Failed to set node power state to power off." if earlier == "same" else earlier
    metal.pool.behaviour = replace(QUICK, power_fails=ends, power_s=0.2)
    stopping = driver.change(order(built, ChangeKind.STOP))
    if ends:
        with pytest.raises(ChangeFault, match="Failed to set node power state") as caught:
            await stopping
        assert (caught.value.code, caught.value.runs) == ("node.power_failed", True)
    else:
        assert not (await stopping).runs and metal.node["power_state"] == "power off"


async def test_a_rebuild_writes_the_new_image_with_a_new_config_drive_once(metal: Metal) -> None:
    node = metal.first
    old = ImageSource(source="http://images/old.qcow2", checksum="http://images/SUMS", kernel="http://images/k")
    driver = await metal.deployed(build(node, image_source=old, name="web"), images={"debian-12": IMAGE})
    metal.requested.clear()
    again = ConfigDrive(user_data="again")
    wanted: dict[str, Any] = {"name": "web", "image": "debian-12", "config_drive": again}
    assert (await driver.change(order(node, ChangeKind.REBUILD, 3, **wanted))).runs
    info = metal.node["instance_info"]
    assert (info["image_source"], info["image_os_hash_value"]) == (IMAGE.source, DIGEST)
    assert "kernel" not in info and "image_checksum" not in info, "nothing of the old image"
    assert metal.pool.config_drives[node]["user_data"] == "again"
    assert list(metal.requested) == [("PATCH", node), ("PUT", node)]
    tag = info["berth"]
    assert (tag["attempt"], tag["change_number"], tag["instance"]) == (1, 3, INSTANCE)
    assert metal.node["provision_state"] == "active"
    unknown = order(node, ChangeKind.REBUILD, 4, image="debian-13")
    assert await fault(driver.change(unknown)) == (ChangeFault, "image.unknown")
    metal.pool.behaviour = FAILING
    with pytest.raises(ChangeFault) as failed:
        await driver.change(order(node, ChangeKind.REBUILD, 5, image="debian-12"))
    assert (failed.value.code, failed.value.runs) == ("node.rebuild_failed", False)
    await driver.destroy(node)
    assert metal.node["instance_uuid"] is None


async def test_a_rebuild_writes_the_image_of_the_source_that_it_names(metal: Metal) -> None:
    driver = await metal.deployed(build(metal.first), images={"debian-12": IMAGE})
    named = ImageSource(source="http://images/named.qcow2", checksum="http://images/SUMS")
    rebuild = order(metal.first, ChangeKind.REBUILD, 3, image="debian-12", image_source=named)
    assert (await driver.change(rebuild)).runs
    info = metal.node["instance_info"]
    assert (info["image_source"], info["image_checksum"]) == (named.source, named.checksum)


async def test_a_stopped_node_runs_after_its_rebuild_and_the_answer_says_so(metal: Metal) -> None:
    driver = await metal.deployed(build(metal.first), images={"debian-12": IMAGE})
    assert not (await driver.change(order(metal.first, ChangeKind.STOP, 3))).runs
    assert metal.node["power_state"] == "power off"
    assert (await driver.change(order(metal.first, ChangeKind.REBUILD, 4, image="debian-12"))).runs
    assert metal.node["power_state"] == "power on"


async def test_a_rescue_needs_a_password_and_ends_with_its_machine(metal: Metal, driver: Driver, built: str) -> None:
    with pytest.raises(ChangeFault, match="rescue_password") as caught:
        await driver.change(order(built, ChangeKind.RESCUE, 3))
    assert (caught.value.code, caught.value.runs) == ("node.refused", True)
    await driver.change(order(built, ChangeKind.RESCUE, 4, password="sesame"))
    await driver.destroy(built)
    assert metal.node["instance_uuid"] is None


async def test_from_a_rescue_that_failed_unrescuing_is_the_way_back(metal: Metal, driver: Driver, built: str) -> None:
    metal.pool.behaviour = replace(QUICK, rescue_fails=True)
    rescue = order(built, ChangeKind.RESCUE, password="sesame")
    assert await fault(driver.change(rescue)) == (ChangeFault, RESCUE_FAILED)
    assert (await driver.change(order(built, ChangeKind.UNRESCUE, 2))).runs
    assert metal.node["provision_state"] == "active"


@pytest.mark.parametrize("kind", [ChangeKind.STOP, ChangeKind.REBUILD, ChangeKind.RESCUE])
async def test_a_node_that_is_not_ours_is_not_changed(
    metal: Metal, driver: Driver, built: str, kind: ChangeKind
) -> None:
    free = [*metal.nodes][1]
    assert await fault(driver.change(order(built, kind, attempt=2))) == (ChangeFault, "machine.other")
    assert await fault(driver.change(order(free, kind))) == (ChangeFault, MACHINE_ABSENT)
    del metal.node["instance_info"]["berth"]
    assert (await fault(driver.change(order(built, kind))))[0] is NotOwned
    with pytest.raises(ChangeFault, match="no snapshot"):
        await driver.change(order(built, ChangeKind.SNAPSHOT))
    assert not metal.requested


# --- boot from volume: which volume targets a build makes on its node, and what becomes of them


SECRET = "chap-secret"
ROOT = VolumeRequest(volume_id="v-root", properties={"target_iqn": "iqn.2026-11:v", "auth_password": SECRET})
DATA = VolumeRequest(volume_id="v-data", boot_index=1)
OURS = {"database_id": DATABASE_ID, "instance": INSTANCE, "attempt": 1}
EARLIER = {**OURS, "instance": "70000000-0000-4000-8000-000000000000"}
OTHERS = {**OURS, "database_id": "eeeeeeee-0000-4000-8000-000000000001"}


class Volumes:
    """The volume targets of the first node, which has an interface for them, and a driver of them."""

    def __init__(self, metal: Metal, driver: Driver) -> None:
        self.driver = driver
        self.kept = metal.pool.volume_targets
        self._node = metal.first

    @property
    def targets(self) -> dict[str, int]:
        return {one["volume_id"]: one["boot_index"] for one in self.kept.values()}

    def put(self, volume: str, index: int, tag: dict[str, object] | None) -> None:
        uuid = f"90000000-0000-4000-8000-{index:012d}"
        extra = {} if tag is None else {"berth": tag}
        kept = {"uuid": uuid, "node_uuid": self._node, "volume_id": volume, "boot_index": index, "extra": extra}
        self.kept[uuid] = kept


@pytest.fixture
async def volumes(metal: Metal) -> Volumes:
    metal.node["storage_interface"] = "external"
    return Volumes(metal, await metal.driver(volumes="static", clean_timeout_s=0.5))


async def test_a_machine_boots_from_its_volume_and_lets_go_of_it(metal: Metal, volumes: Volumes) -> None:
    await volumes.driver.spawn(build(metal.first, volumes=(ROOT, DATA)))
    assert metal.node["provision_state"] == "active" and "image_source" not in metal.node["instance_info"]
    assert volumes.targets == {"v-root": 0, "v-data": 1}
    (root,) = (one for one in volumes.kept.values() if one["boot_index"] == 0)
    assert (root["node_uuid"], root["volume_type"], root["properties"]) == (metal.first, "iscsi", ROOT.properties)
    volumes.put("operators", 7, None)
    volumes.put("of another berth", 8, OTHERS)
    await volumes.driver.destroy(metal.first)
    assert metal.node["instance_uuid"] is None
    assert volumes.targets == {"operators": 7, "of another berth": 8}, "what is not ours stays"


async def test_what_an_earlier_instance_left_is_not_attached_to_the_next(metal: Metal, volumes: Volumes) -> None:
    volumes.put("a customer's", 0, EARLIER)
    await volumes.driver.spawn(build(metal.first, volumes=(ROOT,)))
    assert volumes.targets == {"v-root": 0}


async def test_an_interrupted_build_makes_each_target_once(metal: Metal, volumes: Volumes) -> None:
    metal.pool.invalid[metal.first] = "no"
    assert (await fault(volumes.driver.spawn(build(metal.first, volumes=(ROOT,))))) == (Reschedule, "node.invalid")
    assert volumes.targets == {"v-root": 0}
    metal.pool.invalid.clear()
    await volumes.driver.spawn(build(metal.first, volumes=(ROOT,)))
    assert volumes.targets == {"v-root": 0} and metal.node["provision_state"] == "active"


async def test_a_node_that_stays_switched_on_keeps_its_target_and_is_named(metal: Metal, volumes: Volumes) -> None:
    volumes.put("v-root", 0, OURS)
    metal.node["power_state"] = "power on"
    with pytest.raises(DriverUnavailable, match="keeps a volume target: Ironic answered 400"):
        await volumes.driver.destroy(metal.first)


@pytest.mark.parametrize(
    ("spec", "setting", "interface", "code"),
    [
        ({"volumes": (ROOT,)}, "none", "external", "volume.none"),
        ({"volumes": (ROOT,), "image": "debian"}, "static", "external", "volume.and_image"),
        ({"volumes": (ROOT,), "image_source": IMAGE}, "static", "external", "volume.and_image"),
        ({"volumes": (DATA,)}, "static", "noop", "node.no_volumes"),
    ],
)
async def test_volumes_that_no_node_here_can_have(
    metal: Metal, spec: dict[str, Any], setting: str, interface: str, code: str
) -> None:
    metal.node["storage_interface"] = interface
    driver = await metal.driver(volumes=setting)
    assert (await fault(driver.spawn(build(metal.first, **spec))))[1] == code
    assert not metal.pool.volume_targets


def test_a_volume_is_one_machines_and_its_secrets_are_not_printed() -> None:
    one = BuildRequest(instance_uuid=INSTANCE, flavor="m", project_id="p", volumes=(ROOT,))
    with pytest.raises(ValueError, match="a volume is one instance's"):
        BuildRequest(instance_uuid=INSTANCE, flavor="m", project_id="p", volumes=(ROOT,), count=2)
    with pytest.raises(ValueError, match="16384"):
        VolumeRequest(volume_id="v", properties={"x": "y" * 17_000})
    assert SECRET not in repr(one)
