"""An operator's work over HTTP: objects, hosts, drains, workers, cells, dead letters; and who else may not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from berth.web.pages.objects import MAX_GROUPS
from tests.kit.waiting import wait_until
from tests.system.web_server import Web, boot, code_of, ended, follow, running_web

pytestmark = [pytest.mark.system, pytest.mark.postgres]

UNKNOWN = "00000000-0000-4000-8000-00000000dead"
ZONE = "0c8f0c9e-3f0d-4d9f-8b58-9c2f6f0f2a11"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


def booted(client: httpx.Client, **fields: Any) -> str:
    instance = boot(client, **fields)
    assert follow(client, instance)[-1][1]["state"] == "active"
    return instance


# --- objects


def test_a_flavor_is_made_used_changed_and_deleted(web: Web) -> None:
    with web.client("op") as client:
        made = client.put("/api/v1/flavors/m1.http", params={"reason": "asked for"}, json={"vcpus": 1, "memory_mb": 64})
        assert made.status_code == 200 and made.json()["changed"][0]["after"]["memory_mb"] == 64, made.text
        stored = client.get("/api/v1/flavors/m1.http").json()
        assert (stored["version"], stored["changed_by"]) == (made.json()["revision"], "op")
        instance = booted(client, flavor="m1.http")
        assert code_of(client.delete("/api/v1/flavors/m1.http"), 409) == "object.in_use"
        client.delete(f"/api/v1/builds/{instance}")
        assert follow(client, instance, "deleted")[-1][1]["state"] == "deleted"
        would = client.delete("/api/v1/flavors/m1.http", params={"dry_run": "true"})
        assert would.status_code == 200 and client.get("/api/v1/flavors/m1.http").status_code == 200
        assert client.delete("/api/v1/flavors/m1.http").status_code == 200
        assert code_of(client.get("/api/v1/flavors/m1.http"), 404) == "object.unknown"
        assert code_of(client.delete("/api/v1/flavors/m1.http"), 404) == "object.unknown"
        log = client.get("/api/v1/objects/log", params={"kind": "flavor", "name": "m1.http"}).json()
        assert [(one["actor"], one.get("reason", "")) for one in log] == [("op", ""), ("op", "asked for")]


def test_a_change_by_version_is_refused_when_another_came_first(web: Web) -> None:
    with web.client("op") as client:
        path, body = "/api/v1/flavors/a%2Fb", {"vcpus": 1}
        first = client.put(path, params={"if_version": "0"}, json=body)
        assert first.status_code == 200, first.text
        assert client.get(path).json()["name"] == "a/b"
        assert code_of(client.put(path, params={"if_version": "0"}, json={"vcpus": 2}), 409) == "object.conflict"
        again = client.put(path, params={"if_version": str(first.json()["revision"])}, json={"vcpus": 2})
        assert again.status_code == 200 and client.delete(path).status_code == 200


def test_a_patch_changes_what_is_named_and_nothing_else(web: Web) -> None:
    with web.client("op") as client, web.client("alice") as alice:
        path = "/api/v1/flavors/patched"
        whole = {"vcpus": 16, "memory_mb": 64, "disk_gb": 3, "extra_specs": {"a": "1", "b": "2"}}
        assert code_of(client.patch(path, json={"vcpus": 1}), 404) == "object.unknown"
        assert client.put(path, json=whole).status_code == 200
        assert code_of(alice.patch(path, json={"vcpus": 32}), 403) == "role.forbidden"
        changed = client.patch(path, params={"reason": "more"}, json={"vcpus": 32, "extra_specs": {"a": None}})
        assert changed.status_code == 200, changed.text
        found = client.get(path).json()
        assert found["body"] == {"vcpus": 32, "memory_mb": 64, "disk_gb": 3, "extra_specs": {"b": "2"}}
        (entry,) = client.get("/api/v1/objects/log", params={"name": "patched", "limit": 1}).json()
        assert (entry["actor"], entry["reason"]) == ("op", "more")
        late = {"if_version": str(found["version"] - 1)}
        assert code_of(client.patch(path, params=late, json={"vcpus": 1}), 409) == "object.conflict"
        now = {"if_version": str(found["version"]), "dry_run": "true"}
        assert client.patch(path, params=now, json={"vcpus": 1}).json()["changed"][0]["after"]["vcpus"] == 1
        assert client.get(path).json() == found
        assert code_of(client.patch(path, json={"vcpu": 1}), 422) == "object.invalid"
        quota, limits = "/api/v1/quotas/p-patched", {"limits": {"VCPU": 4, "INSTANCES": 2}}
        assert client.put(quota, json=limits).status_code == 200
        assert client.patch(quota, json={"limits": {"VCPU": 8}}).status_code == 200
        assert client.get(quota).json()["limits"] == {"VCPU": 8, "INSTANCES": 2}
        assert client.delete(quota).status_code == 200 and client.delete(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "params", "refused"),
    [
        ("/flavors/bad", {"vcpu": 1}, {}, (422, "object.invalid")),
        ("/flavors/bad", {"vcpus": -1}, {}, (422, "object.invalid")),
        ("/flavors/bad", {"vcpus": 1}, {"forse": "true"}, (400, "request.invalid")),
        ("/flavors/bad", {"vcpus": 1}, {"force": "maybe"}, (400, "request.invalid")),
        ("/flavors/bad", {"vcpus": 1}, {"if_version": "x"}, (400, "request.invalid")),
        ("/flavors/" + "x" * 300, {"vcpus": 1}, {}, (400, "request.invalid")),
        ("/aggregates/east", {"uuid": "nothing"}, {}, (422, "object.invalid")),
        ("/quotas/p", {"limits": {"VCPU": -1}}, {}, (422, "object.invalid")),
        ("/rules/default", {"enabled_filters": ["nothing"]}, {}, (422, "plugin.invalid")),
    ],
)
def test_a_wrong_object_is_a_coded_problem(
    web: Web, path: str, body: dict[str, Any], params: dict[str, str], refused: tuple[int, str]
) -> None:
    with web.client("op") as client:
        assert code_of(client.put(f"/api/v1{path}", json=body, params=params), refused[0]) == refused[1]


def test_pages_of_the_log_have_every_object_of_a_change(web: Web) -> None:
    names = [f"log.{number}/x" for number in range(3)]
    with web.client("op") as client:
        made = [{"kind": "flavor", "name": name, "body": {"vcpus": 1}} for name in names]
        assert client.post("/api/v1/objects", json={"changes": made}).status_code == 200
        gone = client.post("/api/v1/objects", json={"changes": [{"kind": "flavor", "name": name} for name in names]})
        found, params = [], {"before": str(gone.json()["revision"] + 1), "limit": "2"}
        while len(found) < 2 * len(names):
            page = client.get("/api/v1/objects/log", params=params).json()
            found += [one["name"] for one in page]
            last = page[-1]
            params |= {"before": str(last["revision"]), "before_object": f"{last['kind']}/{last['name']}"}
        assert found == names * 2


def test_a_quota_is_shown_beside_what_is_used(web: Web) -> None:
    with web.client("op") as client, web.client("alice") as alice, web.client("bob") as bob:
        booted(alice, project_id="p-alice")
        before = alice.get("/api/v1/quotas/p-alice").json()
        used = before["used"]
        assert (before["quota"], before["limits"]) == ("", {}) and used["INSTANCES"] >= 1 and used["VCPU"] >= 1
        client.put("/api/v1/quotas/p-alice", json={"limits": {"INSTANCES": used["INSTANCES"]}})
        try:
            (own,) = alice.get("/api/v1/quotas").json()
            assert (own["quota"], own["limits"], own["used"]) == ("p-alice", {"INSTANCES": used["INSTANCES"]}, used)
            refused = alice.post("/api/v1/builds", json={"flavor": "m1.tiny"}).json()["instance_uuid"]
            assert follow(alice, refused)[-1][1]["code"] == "quota.exceeded"
            assert {one["project"] for one in client.get("/api/v1/quotas").json()} >= {"p-alice"}
            assert code_of(bob.get("/api/v1/quotas/p-alice"), 403) == "project.forbidden"
            assert bob.get("/api/v1/quotas").json()[0]["used"] == {}
        finally:
            assert client.delete("/api/v1/quotas/p-alice").status_code == 200


def test_aggregates_make_zones_and_rules_are_set(web: Web) -> None:
    with web.client("op") as client:
        body = {"uuid": ZONE, "metadata": {"availability_zone": "east"}}
        assert client.put("/api/v1/aggregates/racks", json=body).status_code == 200
        assert client.get("/api/v1/zones").json() == [{"name": "east", "aggregates": ["racks"]}]
        with web.client("alice") as alice:
            assert alice.get("/api/v1/zones").json() == [{"name": "east", "aggregates": []}]
        assert client.get("/api/v1/aggregates").json()["objects"][0]["body"]["uuid"] == ZONE
        assert client.put("/api/v1/rules/default", json={"host_subset_size": 2}).status_code == 200
        assert client.get("/api/v1/rules/default").json()["body"] == {"host_subset_size": 2}
        both = [{"kind": "aggregate", "name": "racks"}, {"kind": "scheduling", "name": "default"}]
        gone = client.post("/api/v1/objects", json={"changes": both, "reason": "over"})
        assert gone.status_code == 200 and len(gone.json()["changed"]) == 2, gone.text
        assert client.get("/api/v1/zones").json() == []
        forged = client.post("/api/v1/objects", json={"changes": both, "actor": "another"})
        assert code_of(forged, 400) == "request.invalid"


def test_a_group_is_shown_with_its_members_to_its_project_alone(web: Web) -> None:
    with web.client("op") as client, web.client("alice") as alice, web.client("bob") as bob:
        made = client.put("/api/v1/groups/p-alice/web", json={"policy": "affinity"})
        assert made.status_code == 200, made.text
        build = alice.post("/api/v1/builds", json={"flavor": "m1.tiny", "group": "web"}).json()["instance_uuid"]
        assert follow(alice, build)[-1][1]["state"] == "active"
        seen = alice.get("/api/v1/groups/p-alice/web").json()
        assert list(seen["members"]) == [build] and seen["group"]["policy"] == "affinity", seen
        assert [one["name"] for one in alice.get("/api/v1/groups").json()["objects"]] == ["p-alice/web"]
        assert bob.get("/api/v1/groups").json()["objects"] == []
        assert code_of(bob.get("/api/v1/groups/p-alice/web"), 404) == "object.unknown"
        assert build in client.get("/objects/groups", params={"name": "p-alice/web"}).text
        assert "p-alice/web" in client.get("/objects").text
        assert code_of(client.delete("/api/v1/groups/p-alice/web"), 409) == "object.in_use"
        assert code_of(alice.delete("/api/v1/groups/p-alice/web"), 409) == "object.in_use"
        assert code_of(bob.delete("/api/v1/groups/p-alice/web"), 403) == "role.forbidden"
        assert alice.delete("/api/v1/groups/p-alice/web", params={"force": "true"}).status_code == 200


def test_a_project_makes_server_groups_of_its_own(web: Web) -> None:
    own, others = {"kind": "group", "name": "p-alice/own"}, {"kind": "group", "name": "p-bob/own"}
    body = {"body": {"policy": "affinity"}}
    with web.client("alice") as alice, web.client("see") as see:
        assert alice.post("/api/v1/objects", json={"changes": [own | body]}).status_code == 200
        assert [one["name"] for one in alice.get("/api/v1/objects?kind=group").json()["objects"]] == ["p-alice/own"]
        for changes in ([others | body], [own, others], [own, {"kind": "flavor", "name": "m1.tiny"}]):
            refused = alice.post("/api/v1/objects", json={"changes": changes})
            assert code_of(refused, 403) == "role.forbidden"
        assert (
            code_of(alice.post("/api/v1/objects", json={"changes": [own], "prune": ["group"]}), 403) == "role.forbidden"
        )
        assert code_of(alice.get("/api/v1/objects?kind=aggregate"), 403) == "role.forbidden"
        assert code_of(see.post("/api/v1/objects", json={"changes": [own | body]}), 403) == "role.forbidden"
        many = [{"kind": "group", "name": f"p-alice/g{number}"} | body for number in range(MAX_GROUPS)]
        assert code_of(alice.post("/api/v1/objects", json={"changes": many}), 409) == "group.too_many"
        assert alice.post("/api/v1/objects", json={"changes": [own]}).status_code == 200


def test_a_project_sees_the_flavors_that_it_may_request(web: Web) -> None:
    with web.client("op") as client, web.client("alice") as alice, web.client("bob") as bob:
        client.put("/api/v1/flavors/secret", json={"vcpus": 1, "projects": ["p-alice", "p-carol"]})
        one = alice.get("/api/v1/flavors/secret").json()
        (listed,) = [one for one in alice.get("/api/v1/flavors").json()["objects"] if one["name"] == "secret"]
        assert one["body"] == listed["body"] == {"vcpus": 1, "projects": ["p-alice"]}, "of p-carol it knows nothing"
        assert code_of(bob.get("/api/v1/flavors/secret"), 404) == "object.unknown"
        names = {one["name"] for one in bob.get("/api/v1/flavors").json()["objects"]}
        assert "m1.tiny" in names and "secret" not in names
        assert client.delete("/api/v1/flavors/secret").status_code == 200


READERS = (
    "/aggregates", "/rules", "/objects", "/objects/log", "/hosts/x", "/hosts/x/claims", "/hosts/x/metrics",
    "/hosts/x/drain-plan",
    "/drain-plan", "/drains",
    f"/drains/{UNKNOWN}", "/workers", "/cells", "/services", "/metal", "/dead-letters", "/dead-letters/api/x",
    "/quarantine", "/breakers", "/breakers/cell1/s", "/recoveries",
)  # fmt: skip
OPERATORS: tuple[tuple[str, str, Any], ...] = (
    ("PUT", "/flavors/x", {"vcpus": 1}),
    ("DELETE", "/flavors/m1.tiny", None),
    ("PUT", "/aggregates/x", {"uuid": ZONE}),
    ("PUT", "/quotas/p-alice", {"limits": {}}),
    ("DELETE", "/quotas/p-alice", None),
    ("PUT", "/rules/default", {}),
    ("POST", "/objects", {"changes": [], "prune": ["group"]}),
    ("POST", "/objects", {"changes": [{"kind": "flavor", "name": "m1.tiny"}]}),
    ("PUT", "/groups/p-bob/x", {"policy": "affinity"}),
    ("PUT", "/hosts/x/admin-state", {"state": "fenced"}),
    ("POST", "/hosts/x/delete", {"reason": "scrapped"}),
    ("POST", "/services/x/delete", {"reason": "scrapped"}),
    ("POST", "/hosts/x/drain", {}),
    ("DELETE", f"/drains/{UNKNOWN}", None),
    ("POST", "/drains", {"name": "cell1"}),
    ("POST", f"/drains/{UNKNOWN}/pause", {}),
    ("POST", f"/drains/{UNKNOWN}/resume", {}),
    ("GET", "/dead-letters/api/scheduler.requests/letters/x", None),
    ("POST", "/dead-letters/api/scheduler.requests/replay", {}),
    ("DELETE", "/dead-letters/api/scheduler.requests", None),
    ("POST", "/quarantine/decide", {"decision": "destroy", "machines": []}),
    ("POST", "/breakers/reset", {"breakers": []}),
    ("POST", "/recoveries/cell1/without", {"service": "gone"}),
    ("POST", "/hosts/x/metrics", {"values": {"power.watts": 1.0}}),
    ("PUT", "/metal/x/maintenance", {"reason": "fan"}),
    ("DELETE", "/metal/x/maintenance", None),
    ("POST", "/recoveries/cell1/accept", {"database_incarnation": 1, "losses": 1, "reason": "lost"}),
)


@pytest.mark.parametrize("path", READERS)
def test_a_project_does_not_see_what_is_the_sites(web: Web, path: str) -> None:
    with web.client("alice") as alice:
        assert code_of(alice.get(f"/api/v1{path}"), 403) == "role.forbidden"


@pytest.mark.parametrize(("method", "path", "body"), OPERATORS)
@pytest.mark.parametrize("token", ["alice", "see"])
def test_what_an_operator_does_no_other_may(web: Web, token: str, method: str, path: str, body: Any) -> None:
    with web.client(token) as client:
        assert code_of(client.request(method, f"/api/v1{path}", json=body), 403) == "role.forbidden"


# --- hosts


def test_a_host_is_shown_with_its_tree_and_who_holds_what(web: Web) -> None:
    with web.client("op") as client, web.client("see") as see:
        instance = booted(client)
        build = client.get(f"/api/v1/builds/{instance}").json()
        shown = see.get(f"/api/v1/hosts/{build['host']}").json()
        assert shown["host"]["name"] == build["host"] and not shown["more"]
        root = shown["providers"][0]
        assert root["depth"] == 0 and root["uuid"] == shown["host"]["uuid"]
        vcpu = root["inventories"]["VCPU"]
        assert vcpu["capacity"] == (vcpu["total"] - vcpu["reserved"]) * vcpu["allocation_ratio"] and vcpu["used"] >= 1
        (holder,) = (one for one in shown["consumers"] if one["consumer"] == instance)
        assert holder["project_id"] == "p" and holder["allocations"][root["uuid"]]["VCPU"] >= 1
        assert see.get(f"/api/v1/hosts/{root['uuid']}").json()["host"]["name"] == build["host"]
        assert code_of(see.get(f"/api/v1/hosts/{UNKNOWN}"), 404) == "host.unknown"


def test_a_host_is_fenced_before_it_is_evacuated(web: Web) -> None:
    with web.client("op") as client:
        instance = booted(client)
        host = client.get(f"/api/v1/builds/{instance}").json()["host"]
        path, action = f"/api/v1/hosts/{host}/admin-state", f"/api/v1/builds/{instance}/actions"
        assert code_of(client.post(action, json={"kind": "evacuate"}), 422) == "host.not_fenced"
        try:
            assert code_of(client.put(path, json={"state": "fenced", "reason": "PSU"}), 409) == "host.service_up"
            forced = {"state": "fenced", "reason": "PSU", "force": True}
            assert client.put(path, json=forced).json()["state"] == "fenced"
            # Accepted now; its cell may still refuse it, as the host's compute service is up.
            assert ended(client, client.post(action, json={"kind": "evacuate"})).get("code") != "host.not_fenced"
        finally:
            client.put(path, json={"state": "enabled"})


def test_a_host_is_drained_by_its_plan(web: Web) -> None:
    with web.client("op") as client, web.client("see") as see:
        instance = booted(client)
        host = client.get(f"/api/v1/builds/{instance}").json()["host"]
        plan = see.get(f"/api/v1/hosts/{host}/drain-plan").json()
        assert plan["host"] == host and {one["instance_uuid"] for one in plan["moves"]} >= {instance}
        assert code_of(client.get(f"/api/v1/hosts/{host}/drain-plan?kind=stop"), 400) == "request.invalid"
        assert code_of(client.get("/api/v1/hosts/nowhere/drain-plan"), 422) == "host.unknown"
        try:
            begun = client.post(f"/api/v1/hosts/{host}/drain", json={"reason": "fan", "at_once": 2})
            assert begun.status_code == 202, begun.text
            assert begun.json()["planned"] == len(plan["moves"]) and begun.json()["by"] == "op"
            where = begun.headers["location"]
            wait_until(lambda: see.get(where).json()["state"] == "ended")
            accepted = see.get(where).json()
            assert instance in accepted["moved"] and not (
                accepted["failed"] or accepted["not_started"] or accepted["under_way"]
            ), accepted
            assert client.get(f"/api/v1/builds/{instance}").json()["host"] != host
            assert client.get(f"/api/v1/hosts/{host}").json()["host"]["admin"]["reason"] == "fan"
            assert see.get("/api/v1/drains").json()[0]["id"] == accepted["id"]
            assert client.delete(where).json()["state"] == "ended"
            assert code_of(client.get(f"/api/v1/drains/{UNKNOWN}"), 404) == "drain.unknown"
        finally:
            client.put(f"/api/v1/hosts/{host}/admin-state", json={"state": "enabled"})


def test_a_service_is_drained_paused_and_resumed(web: Web) -> None:
    with web.client("op") as client, web.client("see") as see:
        instance = booted(client)
        host = client.get(f"/api/v1/builds/{instance}").json()["host"]
        service = client.get(f"/api/v1/hosts/{host}").json()["host"]["service"]
        plan = see.get("/api/v1/drain-plan", params={"name": service, "target": "service"}).json()
        assert instance in {one["instance_uuid"] for one in plan["moves"]}
        assert code_of(see.get("/api/v1/drain-plan", params={"name": "nowhere", "target": "cell"}), 422)
        body = {"name": service, "target": "service", "id": str(uuid.uuid4()), "force": True, "per_minute": 6000}
        begun = client.post("/api/v1/drains", json=body)
        assert (begun.status_code, begun.json()["target"], begun.json()["id"]) == (202, "service", body["id"])
        assert client.post("/api/v1/drains", json=body).json()["started_at"] == begun.json()["started_at"]
        where = begun.headers["location"]
        assert client.post(f"{where}/pause", json={"reason": "lunch"}).status_code in (200, 409)
        assert client.post(f"{where}/resume", json={"deadline_s": 600}).json()["state"] == "running"
        # The cell has no other service: the drain goes on, and names what cannot move.
        stuck = (instance, "no_valid_host")
        wait_until(lambda: stuck in {(one["instance_uuid"], one["code"]) for one in see.get(where).json()["failed"]})
        assert client.delete(where).status_code == 200
        wait_until(lambda: see.get(where).json()["code"] == "drain.stopped")
        assert code_of(client.post(f"{where}/pause", json={}), 409) == "drain.ended"
        for one in see.get("/api/v1/hosts", params={"limit": 1000}).json():
            if one["service"] == service:
                client.put(f"/api/v1/hosts/{one['uuid']}/admin-state", json={"state": "enabled"})


def test_workers_and_cells_are_listed(web: Web) -> None:
    with web.client("see") as see:
        workers = wait_until(lambda: see.get("/api/v1/workers").json())
        wait_until(lambda: {"scheduler", "placement"} <= {one["heartbeat"]["role"] for one in workers_of(see)})
        assert all(one["heartbeat"]["pid"] > 0 for one in workers)
        assert [one["heartbeat"]["role"] for one in see.get("/api/v1/workers?role=placement").json()] == ["placement"]
        cells = see.get("/api/v1/cells").json()
        assert [(one["name"], one["configured"], one["hosts"]) for one in cells] == [
            ("cell1", True, 3),
            ("cell2", True, 3),
        ]
        assert all(one["services"] == one["services_up"] == 1 and one["hosts_up"] == 3 for one in cells)
        assert {(one["state"], one["version"]) for one in cells} == {("enabled", 0)}


def test_a_cell_is_disabled_and_enabled(web: Web) -> None:
    with web.client("op") as client, web.client("see") as see:
        assert code_of(see.put("/api/v1/cells/cell2", json={"state": "disabled"}), 403) == "role.forbidden"
        assert code_of(client.put("/api/v1/cells/cell3", json={"state": "disabled"}), 404) == "object.unknown"
        body = {"state": "disabled", "reason": "its power is worked on"}
        assert client.put("/api/v1/cells/cell2", json=body).json()["changed"][0]["after"] == body
        try:
            shown = {one["name"]: one for one in see.get("/api/v1/cells").json()}
            assert (shown["cell2"]["state"], shown["cell2"]["reason"]) == ("disabled", "its power is worked on")
            assert shown["cell1"]["state"] == "enabled"
            assert "its power is worked on" in client.get("/system").text
            assert code_of(client.put("/api/v1/cells/cell1", json={"state": "disabled"}), 409) == "object.in_use"
        finally:
            assert client.delete("/api/v1/cells/cell2").status_code == 200
        assert {one["state"] for one in see.get("/api/v1/cells").json()} == {"enabled"}


def workers_of(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/api/v1/workers").json()
    return found


def test_without_ironic_metal_is_a_coded_problem(web: Web) -> None:
    with web.client("see") as see:
        assert code_of(see.get("/api/v1/metal"), 503) == "ironic.unavailable"


# --- dead letters


def test_dead_letters_are_counted_shown_replayed_and_purged(web: Web) -> None:
    one, two = (f"letter-{uuid.uuid4()}" for _ in range(2))
    command = b'{"type": "inventory.update.v1", "secret": "s"}'
    web.give_up("placement.inventory", one, command)
    web.give_up("placement.inventory", two, command)
    queue = "/api/v1/dead-letters/api/placement.inventory"
    with web.client("op") as client, web.client("see") as see:
        counts = {(row["bus"], row["queue"]): row["dead"] for row in see.get("/api/v1/dead-letters").json()}
        assert counts["api", "placement.inventory"] == 2
        letters = see.get(queue).json()
        assert [letter["id"] for letter in letters] == [one, two]
        assert letters[0]["code"] == "test.given_up" and "secret" not in see.get(queue).text
        assert "secret" in client.get(f"{queue}/letters/{one}").json()["body"]
        assert code_of(client.get(f"{queue}/letters/none"), 404) == "dead_letter.unknown"
        assert client.post(f"{queue}/replay", json={"ids": [one]}).json() == {
            "replayed": [one],
            "too_old": [],
            "blocked": {},
            "fault": "",
        }
        wait_until(lambda: one in {letter["id"] for letter in see.get(queue).json()})  # it is refused and parked again
        assert client.delete(queue).json()["purged"] == 2
        assert see.get(queue).json() == []
        assert code_of(client.get("/api/v1/dead-letters/mars/x"), 404) == "bus.unknown"
        assert code_of(client.get("/api/v1/dead-letters/api/nothing"), 404) == "queue.unknown"
        assert code_of(client.post(f"{queue}/replay", json={"ids": []}), 400) == "request.invalid"


# --- pages

HOSTILE = "<script>alert(1)</script>\u202eevil"
PAGES = (
    "/operations",
    "/actions",
    "/dead-letters",
    "/objects/log",
    "/objects",
    "/objects/flavors",
    "/objects/flavors?name=m1.tiny",
    "/objects/quotas?name=p",
    "/system",
)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_for_operators_is_shown(web: Web, path: str) -> None:
    with web.client("op", accept="text/html") as client:
        page = client.get(path)
        assert page.status_code == 200 and "<h1>" in page.text, page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


def test_pages_show_a_host_its_plan_its_build_and_its_drain(web: Web) -> None:
    with web.client("op", accept="text/html") as client, web.client("see", accept="text/html") as see:
        instance = booted(client, name="shown")
        build = client.get(f"/api/v1/builds/{instance}").json()
        host = client.get(f"/api/v1/hosts/{build['host']}").json()["host"]
        page = client.get(f"/fleet/{host['uuid']}").text
        assert instance in page and "Disable" in page and "MEMORY_MB" in page
        assert "Disable" not in see.get(f"/fleet/{host['uuid']}").text
        plan = client.get(f"/fleet/{host['uuid']}/drain").text
        assert instance in plan and "Drain it" in plan
        assert "Drain it" not in see.get(f"/fleet/{host['uuid']}/drain").text
        ended(client, client.post(f"/api/v1/builds/{instance}/actions", json={"kind": "stop"}))
        shown = client.get(f"/builds/{instance}").text
        assert "Why this host" in shown and "Requests about it since" in shown and "live-migrate" in shown
        assert instance in client.get("/actions").text
        assert client.get("/metal").status_code == 503


def test_what_is_not_for_a_role_has_no_page(web: Web) -> None:
    with web.client("alice") as alice, web.client("see") as see:
        for path in (
            "/", "/fleet", "/fleet/x", "/fleet/x/drain", "/operations", "/quarantine", "/dead-letters",
            f"/drains/{UNKNOWN}", "/metal", "/objects", "/objects/log", "/system",
        ):  # fmt: skip
            assert code_of(alice.get(path), 403) == "role.forbidden"
        assert alice.get("/actions").status_code == 200
        assert code_of(see.get("/objects/flavors"), 403) == "role.forbidden"


def test_hostile_names_of_objects_and_reasons_are_only_text(web: Web) -> None:
    with web.client("op", accept="text/html") as client:
        spec = {"vcpus": 1, "extra_specs": {f"x:{HOSTILE}": HOSTILE}}
        made = client.put("/api/v1/flavors/<b>bold", json=spec, params={"reason": HOSTILE})
        assert made.status_code == 200, made.text
        host = client.get("/api/v1/hosts").json()[0]
        path = f"/api/v1/hosts/{host['name']}/admin-state"
        client.put(path, json={"state": "disabled", "reason": HOSTILE})
        try:
            pages = (
                "/objects/flavors?name=%3Cb%3Ebold",
                f"/fleet/{host['uuid']}",
                "/objects/log",
                "/operations",
                "/fleet",
            )
            for page in ("/objects", *pages):
                text = client.get(page).text
                assert "<script>alert" not in text and "\u202e" not in text and "<b>bold" not in text, page
                assert "&lt;script&gt;alert(1)" in text, page
        finally:
            client.put(path, json={"state": "enabled"})
            client.delete("/api/v1/flavors/<b>bold")
