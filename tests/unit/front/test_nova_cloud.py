"""A cloud's definitions, read from Nova and Keystone: paged, and with rows that are none."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from berth.nova import cloud as reading
from berth.nova.cloud import Cloud, read_cloud
from bus.clock import SystemClock
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.nova_rest import NovaRefused, NovaRest

UUID = "00000000-0000-4000-8000-000000000007"
FLAVOR = {"id": "1", "name": "f", "vcpus": 1, "ram": 512, "disk": 1, "swap": 0, "extra_specs": {}}
DEFAULT = {"cores": 20, "ram": 51_200, "instances": 10, "id": "default"}


def group(number: int) -> dict[str, Any]:
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
            return {"server_groups": [group(number) for number in range(at, min(at + 2, 5))]}
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


async def read(changed: dict[str, Any] | None = None, keystone: str = "", *projects: str) -> Cloud:
    nova = NovaRest(
        NovaApiConfig(url="http://nova/v2.1", page_size=2),
        clock=SystemClock(),
        setting="nova",
        transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answers(request, changed or {}))),
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
