"""A Nova cloud's definitions: how they are read, and row by row as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from berth.cli.common import Stop
from berth.cli.objects import nova_import as import_nova
from berth.cli.objects.nova_import import config_of, names_of, parts_of, tree_of
from berth.cli.objects.objects import read_file
from berth.cli.site.as_toml import as_toml
from berth.nova_objects import cloud as reading
from berth.nova_objects.cloud import Cloud, FlavorRow, GroupRow, ProjectLimit, RegisteredLimit, read_cloud
from berth.nova_objects.to_nova import exported
from berth.nova_objects.to_objects import imported
from bus.clock import SystemClock
from bus.contracts.objects import ObjectKind
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.rest import AggregateRow, NovaRefused, NovaRest

# --- A Nova cloud's definitions as objects, and objects as Nova's: row by row.


UUID = "00000000-0000-4000-8000-000000000007"
OTHER = "00000000-0000-4000-8000-000000000008"


def flavor(name: str = "f", specs: dict[str, str] | None = None, **more: Any) -> FlavorRow:
    return FlavorRow(id=name, name=name, extra_specs=specs or {}, **{"vcpus": 2, "ram": 512, "disk": 10, **more})


@pytest.mark.parametrize(
    ("row", "body"),
    [
        (flavor(), {"vcpus": 2, "memory_mb": 512, "disk_gb": 10, "extra_specs": {}}),
        (flavor(ephemeral=5, swap=1025), {"disk_gb": 17}),
        (flavor(swap=""), {"disk_gb": 10}),
        (flavor(specs={"hw:cpu_policy": "shared"}), {"extra_specs": {"hw:cpu_policy": "shared"}}),
        (
            flavor(specs={"hw:cpu_policy": "dedicated", "hw:emulator_threads_policy": "isolate"}),
            {
                "extra_specs": {
                    "hw:cpu_policy": "dedicated",
                    "hw:emulator_threads_policy": "isolate",
                    "resources:PCPU": "3",
                    "resources:VCPU": "0",
                }
            },
        ),
        (
            flavor(specs={"resources1:VGPU": "1", "trait1:CUSTOM_A": "required"}),
            {"extra_specs": {"resources1:VGPU": "1", "trait1:CUSTOM_A": "required"}},
        ),
        (
            flavor(specs={"resources1:VGPU": "1", "resources_A:VGPU": "1"}),
            {"extra_specs": {"resources1:VGPU": "1", "resources_A:VGPU": "1", "group_policy": "none"}},
        ),
        (
            flavor(specs={"resources1:VGPU": "1", "resources2:VGPU": "1", "group_policy": "isolate"}),
            {"extra_specs": {"resources1:VGPU": "1", "resources2:VGPU": "1", "group_policy": "isolate"}},
        ),
    ],
)
def test_flavors(row: FlavorRow, body: dict[str, Any]) -> None:
    found = imported(Cloud(flavors=[row]))
    assert found.excluded == () and found.objects[ObjectKind.FLAVOR]["f"].items() >= body.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"hw:cpu_thread_policy": "isolate"}, {"trait:HW_CPU_HYPERTHREADING": "forbidden"}),
        ({"hw:cpu_thread_policy": "require"}, {"trait:HW_CPU_HYPERTHREADING": "required"}),
        ({"hw:cpu_thread_policy": "prefer"}, {}),
        (
            {"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "require"},
            {"resources:PCPU": "2", "resources:VCPU": "0", "trait:HW_CPU_HYPERTHREADING": "required"},
        ),
        ({"hw:virtio_packed_ring": "true"}, {"root_required": "COMPUTE_NET_VIRTIO_PACKED"}),
        ({"hw:virtio_packed_ring": "false"}, {}),
        (
            {"hw:ephemeral_encryption": "true", "hw:ephemeral_encryption_format": "luks"},
            {"root_required": "COMPUTE_EPHEMERAL_ENCRYPTION,COMPUTE_EPHEMERAL_ENCRYPTION_LUKS"},
        ),
        ({"hw:maxphysaddr_mode": "emulate"}, {"trait:COMPUTE_ADDRESS_SPACE_EMULATED": "required"}),
        ({"hw:maxphysaddr_mode": "passthrough"}, {"trait:COMPUTE_ADDRESS_SPACE_PASSTHROUGH": "required"}),
        ({"hw:sound_model": "virtio"}, {"root_required": "COMPUTE_SOUND_MODEL_VIRTIO"}),
        ({"hw:sound_model": "ac97"}, {}),
        (
            {"hw:tpm_version": "2.0", "hw:tpm_model": "tpm-crb"},
            {
                "root_required": "COMPUTE_SECURITY_TPM_SECRET_SECURITY_USER",
                "trait:COMPUTE_SECURITY_TPM_2_0": "required",
                "trait:COMPUTE_SECURITY_TPM_CRB": "required",
            },
        ),
        ({"hw:pmem": "A,B,A"}, {"resources:CUSTOM_PMEM_NAMESPACE_A": "2", "resources:CUSTOM_PMEM_NAMESPACE_B": "1"}),
        ({"os:secure_boot": "required"}, {"trait:COMPUTE_SECURITY_UEFI_SECURE_BOOT": "required"}),
        ({"os:secure_boot": "disabled", "hw:vif_multiqueue_enabled": "true", "quota:vif_outbound_peak": "9"}, {}),
    ],
)
def test_what_decides_in_nova_decides_here_and_goes_back_as_it_is(words: dict[str, str], said: dict[str, str]) -> None:
    found = imported(Cloud(flavors=[flavor(specs=words)]))
    body = found.objects[ObjectKind.FLAVOR]["f"]
    assert found.excluded == () and body["extra_specs"] == words | said
    back = exported([(ObjectKind.FLAVOR, "f", body)])
    properties = " ".join(f"--property {key}={value}" for key, value in sorted(words.items()))
    assert back.commands == (f"openstack flavor create --vcpus 2 --ram 512 --disk 10 {properties} f",)
    assert back.excluded == ()


def test_a_flavor_with_amounts_of_cpus_beside_a_policy_is_not_exported() -> None:
    """Nova refuses each boot of it."""
    specs = {"hw:cpu_policy": "dedicated", "resources:PCPU": "9", "resources:VCPU": "0"}
    found = exported([(ObjectKind.FLAVOR, "f", {"vcpus": 2, "memory_mb": 512, "extra_specs": specs})])
    assert [one.name for one in found.excluded] == ["f"] and not found.commands


@pytest.mark.parametrize(
    ("words", "notes"),
    [({"hw:cpu_policy": "dedicated"}, 1), ({"hw:pmem": "A"}, 1), ({"hw:cpu_policy": "shared"}, 0)],
)
def test_a_flavor_that_the_front_leaves_to_the_fallback_is_named(words: dict[str, str], notes: int) -> None:
    found = imported(Cloud(flavors=[flavor("pinned", specs=words)]))
    assert [("pinned" in one, "NUMATopologyFilter" in one) for one in found.notes] == [(True, True)] * notes


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (flavor(specs={"hw:numa_nodes": "2"}), "import.spec"),
        (flavor(specs={"hw:mem_page_size": "large"}), "import.spec"),
        (flavor(specs={"accel:device_profile": "fpga"}), "import.spec"),
        (flavor(specs={"hw:cpu_realtime": "yes", "hw:cpu_policy": "dedicated"}), "import.spec"),
        (flavor(specs={"hw:mem_encryption": "true"}), "import.spec"),
        (flavor(specs={"hw:cpu_thread_policy": "nonsense"}), "import.spec"),
        (flavor(specs={"hw:maxphysaddr_mode": "nonsense"}), "import.spec"),
        (flavor(specs={"pci_passthrough:alias": "a:1"}), "import.spec"),
        (flavor(specs={"hw:cpu_policy": "mixed"}), "import.spec"),
        (flavor(is_public=False), "import.of_nobody"),
        (flavor(specs={"resources:nonsense": "1"}), "import.refused"),
        (flavor(specs={"resources:NO_SUCH_CLASS": "1"}), "import.refused"),
        (flavor(specs={"a": "x" * 300}), "import.refused"),
        (flavor("a\nb"), "import.refused"),
        (flavor(vcpus=0, ram=0, disk=0), "import.refused"),
    ],
)
def test_flavors_that_cannot_be_taken(row: FlavorRow, code: str) -> None:
    found = imported(Cloud(flavors=[row, flavor("other")]))
    assert [(one.name, one.code) for one in found.excluded] == [(row.name, code)]
    assert found.objects[ObjectKind.FLAVOR].keys() == {"other"}


def test_a_private_flavor_is_its_projects() -> None:
    found = imported(Cloud(flavors=[flavor(is_public=False)], access={"f": ("p1", "p2")}))
    assert found.objects[ObjectKind.FLAVOR]["f"]["projects"] == ["p1", "p2"]


def test_extra_specs_that_are_not_shown_leave_a_flavor_out() -> None:
    row = FlavorRow(id="f", name="f", vcpus=1, ram=1, disk=1)
    assert [one.code for one in imported(Cloud(flavors=[row])).excluded] == ["import.unreadable"]


def test_aggregates_with_and_without_their_hosts() -> None:
    rack = AggregateRow(uuid=UUID, name="rack", metadata={"availability_zone": "z"}, hosts=("b", "a"))
    body = {"uuid": UUID, "name": "rack", "metadata": {"availability_zone": "z"}}
    assert imported(Cloud(aggregates=[rack])).objects[ObjectKind.AGGREGATE] == {"rack": body}
    assert imported(Cloud(aggregates=[rack]), with_hosts=True).objects[ObjectKind.AGGREGATE] == {
        "rack": {**body, "hosts": ["a", "b"]}
    }
    nameless = AggregateRow(uuid=UUID, name="nameless", metadata={"availability_zone": " z"}, hosts=())
    assert [one.code for one in imported(Cloud(aggregates=[nameless])).excluded] == ["import.refused"]
    many = AggregateRow(uuid=UUID, name="many", hosts=tuple(map(str, range(1001))))
    assert [one.name for one in imported(Cloud(aggregates=[many]), with_hosts=True).excluded] == ["many"]
    assert imported(Cloud(aggregates=[many])).excluded == ()


def group(uuid: str = UUID, name: str = "web", project: str = "p", **more: Any) -> GroupRow:
    return GroupRow(id=uuid, name=name, project_id=project, **{"policy": "anti-affinity", **more})


def test_server_groups_and_those_that_a_project_calls_alike() -> None:
    rows = [group(), group(OTHER), group(OTHER[:-1] + "9", project="q", rules={"max_server_per_host": "3"})]
    found = imported(Cloud(groups=rows))
    assert found.objects[ObjectKind.GROUP] == {
        f"p/web-{UUID}": {"uuid": UUID, "policy": "anti-affinity"},
        f"p/web-{OTHER}": {"uuid": OTHER, "policy": "anti-affinity"},
        "q/web": {"uuid": OTHER[:-1] + "9", "policy": "anti-affinity", "max_per_host": 3},
    }
    assert found.excluded == () and len(found.notes) == 2


@pytest.mark.parametrize(
    "row",
    [
        group(policy=None),
        group(policy="legacy"),
        group(project="no project"),
        group("no uuid"),
        group(name="x" * 255),
        group(name="a\tb"),
        group(rules={"max_server_per_host": 0}),
        group(rules={"max_server_per_host": "many"}),
    ],
)
def test_server_groups_that_cannot_be_taken(row: GroupRow) -> None:
    found = imported(Cloud(groups=[row]))
    assert [one.code for one in found.excluded] == ["import.refused"] and not found.objects


def test_nova_s_own_quotas() -> None:
    default = {"cores": 20, "ram": 51_200, "instances": 10, "key_pairs": 100}
    quotas = {"same": default, "more": {**default, "cores": 99}, "free": {"cores": -1, "ram": -1, "instances": -1}}
    found = imported(Cloud(default_quota=default, quotas=quotas))
    assert tree_of(found)["quotas"] == {
        "default": {"INSTANCES": 10, "MEMORY_MB": 51_200, "PCPU": 20, "VCPU": 20},
        "free": {},
        "more": {"INSTANCES": 10, "MEMORY_MB": 51_200, "PCPU": 99, "VCPU": 99},
    }
    assert found.excluded == () and "key_pairs" in found.notes[0] and "PCPU" in found.notes[1]


def test_unified_limits() -> None:
    registered = [
        RegisteredLimit(resource_name=name, default_limit=limit)
        for name, limit in (
            ("servers", 10),
            ("class:VCPU", 20),
            ("class:PCPU", -1),
            ("volumes", 5),
            ("server_groups", 7),
        )
    ]
    limits = [
        ProjectLimit(resource_name="class:VCPU", resource_limit=99, project_id="p"),
        ProjectLimit(resource_name="class:CUSTOM_GOLD", resource_limit=1, project_id="p"),
        ProjectLimit(resource_name="servers", resource_limit=10, project_id="same"),
        ProjectLimit(resource_name="servers", resource_limit=1, domain_id="d"),
        ProjectLimit(resource_name="volumes", resource_limit=1, domain_id="d"),
        ProjectLimit(resource_name="class:nonsense", resource_limit=1, project_id="odd"),
    ]
    found = imported(
        Cloud(registered=registered, limits=limits, quotas={"p": {"cores": 1}}, default_quota={"cores": 2})
    )
    assert tree_of(found)["quotas"] == {
        "default": {"INSTANCES": 10, "VCPU": 20},
        "p": {"CUSTOM_GOLD": 1, "INSTANCES": 10, "VCPU": 99},
    }
    assert [(one.name, one.code) for one in found.excluded] == [
        ("d servers", "import.limit"),
        ("odd", "import.refused"),
    ]


def test_rows_that_could_not_be_read_are_named() -> None:
    found = imported(Cloud(unreadable=[("flavor", "odd", "why")]))
    assert [(one.kind, one.name, one.code) for one in found.excluded] == [("flavor", "odd", "import.unreadable")]


def test_files_of_no_more_than_a_change_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_nova, "MAX_CHANGES", 2)
    found = imported(Cloud(flavors=[flavor(name) for name in ("a", "b", "c")], groups=[group()]))
    parts = parts_of(found)
    files = names_of(tmp_path / "nova.toml", len(parts))
    assert [one.name for one in files] == ["nova.toml", "nova-2.toml"]
    read = set()
    for file, part in zip(files, parts, strict=True):
        file.write_text(as_toml(part))
        read |= {(one.kind, one.name) for one in read_file(file)[0]}
    assert read == {(kind, name) for kind, bodies in found.objects.items() for name in bodies}


async def test_a_part_of_an_earlier_import_is_not_left_beside_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`berth apply nova*.toml` would have brought back what Nova no longer has."""

    async def cloud(*_: object) -> Cloud:
        return Cloud(flavors=[flavor("a")])

    monkeypatch.setattr(import_nova, "read_cloud", cloud)
    (tmp_path / "nova-2.toml").write_text("")
    with pytest.raises(Stop) as stopped:
        await import_nova.import_nova("http://n/v2.1", output=tmp_path / "nova.toml")
    assert stopped.value.code == "import.file" and not (tmp_path / "nova.toml").exists()
    (tmp_path / "nova-2.toml").unlink()
    assert await import_nova.import_nova("http://n/v2.1", output=tmp_path / "nova.toml") == 0


def test_credentials_are_those_of_openstack_s_clients() -> None:
    login = {"OS_AUTH_URL": "http://k/v3", "OS_USERNAME": "u", "OS_PASSWORD": "p", "OS_PROJECT_NAME": "admin"}
    config = config_of("http://n/v2.1", login)
    assert (config.keystone.auth_url, config.keystone.username, config.keystone.project_name) == (
        "http://k/v3",
        "u",
        "admin",
    )
    assert config_of("http://n", {**login, "OS_TOKEN": "t"}).keystone.auth_url == ""


def test_the_other_way_round() -> None:
    found = exported(
        [
            (ObjectKind.FLAVOR, "a b", {"vcpus": 2, "memory_mb": 512, "extra_specs": {"trait:X": "required"}}),
            (ObjectKind.FLAVOR, "bm", {"extra_specs": {"resources:CUSTOM_GOLD": "1"}, "projects": ["p"]}),
            (ObjectKind.FLAVOR, "ours", {"vcpus": 1, "extra_specs": {"trait:in:A,B": "required"}}),
            (
                ObjectKind.AGGREGATE,
                "r",
                {"uuid": UUID, "metadata": {"availability_zone": "z", "k": "v"}, "hosts": ["h"]},
            ),
            (ObjectKind.GROUP, "p/web", {"policy": "anti-affinity", "max_per_host": 2}),
            (ObjectKind.QUOTA, "default", {"limits": {"VCPU": 5, "PCPU": 5, "CUSTOM_GOLD": 1}}),
            (ObjectKind.SCHEDULING, "default", {"multipliers": {"ram": -1.0}}),
        ]
    )
    assert found.commands == (
        "openstack aggregate create --zone z --property k=v r",
        "openstack aggregate add host r h",
        "openstack flavor create --vcpus 2 --ram 512 --disk 0 --property trait:X=required 'a b'",
        "openstack flavor create --vcpus 1 --ram 1 --disk 0 --property resources:CUSTOM_GOLD=1"
        " --property resources:MEMORY_MB=0 --property resources:VCPU=0 --private bm",
        "openstack flavor set --project p bm",
        "openstack --os-compute-api-version 2.64 --os-project-id p server group create --policy anti-affinity"
        " --rule max_server_per_host=2 web",
        "openstack quota set --class --cores 5 --instances -1 --ram -1 default",
    )
    assert [(one.kind, one.name) for one in found.excluded] == [
        ("flavor", "ours"),
        ("quota", "default"),
        ("scheduling", "default"),
    ]


# --- A cloud's definitions, read from Nova and Keystone: paged, and with rows that are none.


FLAVOR = {"id": "1", "name": "f", "vcpus": 1, "ram": 512, "disk": 1, "swap": 0, "extra_specs": {}}
DEFAULT = {"cores": 20, "ram": 51_200, "instances": 10, "id": "default"}


def group_body(number: int) -> dict[str, Any]:
    return {"id": f"g{number}", "name": "web", "project_id": "of-group", "policy": "affinity", "rules": {}}


def answers(request: httpx.Request, changed: dict[str, Any]) -> Any:
    path, params = request.url.path.removeprefix("/v2.1"), request.url.params
    if path in changed:
        return changed[path]
    match path:
        case "/":
            return {"version": {"version": "2.104"}}
        case "/flavors/detail":
            assert params["is_public"] == "None"
            private = {**FLAVOR, "id": "2", "name": "ours", "os-flavor-access:is_public": False}
            return {"flavors": [] if "marker" in params else [FLAVOR, private, {"name": "odd"}, {"id": "3"} | FLAVOR]}
        case "/flavors/2/os-flavor-access":
            return {"flavor_access": [{"flavor_id": "2", "tenant_id": "of-flavor"}]}
        case "/os-aggregates":
            return {"aggregates": [{"uuid": UUID, "name": "a", "hosts": [], "metadata": {}}, {"name": "bad"}]}
        case "/os-server-groups":
            assert params["all_projects"] == "true"
            at = int(params.get("offset", 0))
            return {"server_groups": [group_body(number) for number in range(at, min(at + 2, 5))]}
        case "/os-quota-class-sets/default":
            return {"quota_class_set": DEFAULT}
        case "/v3/projects":
            return {"projects": [{"id": "of-keystone"}], "links": {"next": None}}
        case "/v3/registered_limits":
            return {"registered_limits": []}
        case "/v3/limits":
            return {"limits": []}
    assert path.startswith("/os-quota-sets/"), path
    return {"quota_set": {**DEFAULT, "cores": len(path)}}


def answered(found: Any) -> httpx.Response:
    return httpx.Response(found, json={}) if isinstance(found, int) else httpx.Response(200, json=found)


async def read(changed: dict[str, Any] | None = None, keystone: str = "", *projects: str) -> Cloud:
    nova = NovaRest(
        NovaApiConfig(url="http://nova/v2.1", page_size=2),
        clock=SystemClock(),
        setting="nova",
        transport=httpx.MockTransport(lambda request: answered(answers(request, changed or {}))),
    )
    return await read_cloud(nova, keystone, projects)


async def test_everything_of_all_projects_that_something_names() -> None:
    found = await read(None, "", "given")
    assert [one.name for one in found.flavors] == ["f", "ours", "f"] and found.access == {"2": ("of-flavor",)}
    assert [one.id for one in found.groups] == ["g0", "g1", "g2", "g3", "g4"]
    assert found.default_quota == {"cores": 20, "ram": 51_200, "instances": 10}
    assert sorted(found.quotas) == ["given", "of-flavor", "of-group"]
    assert [(kind, name) for kind, name, _ in found.unreadable] == [("flavor", "odd"), ("aggregate", "bad")]
    assert not found.is_unified


async def test_a_project_that_keystone_no_longer_has_is_a_note() -> None:
    """Nova keeps its server groups, and answers 400 when it is asked for its quota: nothing at all was imported."""
    found = await read({"/os-quota-sets/of-group": 400})
    assert sorted(found.quotas) == ["of-flavor"] and [project for project, _ in found.without_quota] == ["of-group"]
    made = imported(found)
    assert any("of-group" in one for one in made.notes) and not any(one.kind == "quota" for one in made.excluded)


async def test_keystone_lists_the_projects() -> None:
    assert sorted((await read(None, "http://keystone/v3")).quotas) == ["of-flavor", "of-group", "of-keystone"]


async def test_unified_limits_are_keystone_s_and_then_nova_s_own_are_not_read() -> None:
    limits = {
        "/v3/registered_limits": {
            "registered_limits": [{"id": "r", "resource_name": "class:VCPU", "default_limit": 5, "service_id": "s"}]
        },
        "/v3/limits": {"limits": [{"project_id": "p", "resource_name": "class:VCPU", "resource_limit": 9}, {"a": 1}]},
    }
    found = await read(limits, "http://keystone")
    assert found.is_unified and found.quotas == {}
    assert [one.resource_limit for one in found.limits] == [9] and found.unreadable[-1][0] == "limits"


@pytest.mark.parametrize(
    ("path", "answer", "code"),
    [
        ("/os-quota-class-sets/default", {}, "nova.not_a_list"),
        ("/os-aggregates", {"aggregates": 1}, "nova.not_a_list"),
        ("/v3/projects", [], "nova.not_json"),
        ("/v3/projects", {"projects": [], "truncated": True}, "nova.not_a_list"),
        ("/os-quota-sets/of-group", 403, "nova.http_403"),
    ],
)
async def test_what_is_no_answer_is_refused(path: str, answer: Any, code: str) -> None:
    with pytest.raises(NovaRefused) as refused:
        await read({path: answer}, "http://keystone")
    assert refused.value.code == code


async def test_projects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_PROJECTS", 1)
    with pytest.raises(NovaRefused):
        await read()
