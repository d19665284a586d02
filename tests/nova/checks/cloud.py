"""A small Nova cloud and what its checks assert. Run by Nova's own interpreter."""

from __future__ import annotations

import threading
from typing import Any

from nova import context, objects
from nova.tests.functional import integrated_helpers

Server = dict[str, Any]

HOSTS = ("host1", "host2", "host3")
MEMORY_MB = 8192 - 512  # of a host of the fake driver, less what Nova reserves
IMAGE = "155d900f-4e14-4e4c-a73d-069cbf4541e6"  # of Nova's Glance fixture
OTHER_IMAGE = "a2459075-d96c-40d5-893e-577ff92e721c"

PATIENCE = 120  # looks at a server, half a second apart


class Cloud(integrated_helpers.ProviderUsageBaseTestCase):  # type: ignore[misc]
    """Hosts of 10 VCPU and 8 GB, in no zone."""

    compute_driver = "fake.MediumFakeDriver"
    hosts = HOSTS

    def setUp(self) -> None:
        self.flags(instances=-1, cores=-1, ram=-1, group="quota")
        super().setUp()
        for host in self.hosts:
            self._start_compute(host)
        self.api.microversion = "latest"

    # --- what a user does

    def flavor(self, vcpus: int = 1, memory_mb: int = 512, disk_gb: int = 1, **specs: Any) -> str:
        """The id of a new flavor; specs: `_` stands for `:`, as `resources_CUSTOM_X`."""
        extra = {name.replace("_", ":", 1): str(value) for name, value in specs.items()}
        made: str = self._create_flavor(
            memory_mb=memory_mb, vcpu=vcpus, disk=disk_gb, ephemeral=0, swap=0, extra_spec=extra
        )
        return made

    def request(
        self, flavor: str | None = None, image: str = IMAGE, hints: dict[str, Any] | None = None, **more: Any
    ) -> Server:
        """Ask for a server; it is as Nova shows it at once."""
        body = self._build_server(image_uuid=image, flavor_id=flavor or self.flavor(), networks="none") | more
        wanted = {"server": body} | ({"os:scheduler_hints": hints} if hints else {})
        made: Server = self.api.post_server(wanted)
        return made

    def boot(self, state: str = "ACTIVE", **wanted: Any) -> Server:
        """A server, and its end checked: where it runs it has claimed, and where not it has nothing."""
        return self.settled(self.request(**wanted), state)

    def settled(self, server: Server, state: str = "ACTIVE") -> Server:
        """The server in that state, its claim checked."""
        server = self.waited(server, state)
        if state == "ERROR":
            self.assertIn("No valid host", server["fault"]["message"])
            self.assertEqual({}, self.claims(server["id"]))
        elif state == "ACTIVE":
            self.assert_claimed(server)
        return server

    def waited(self, server: Server, state: str) -> Server:
        """The server in that state, however slow this computer is."""
        found: Server = self._wait_for_server_parameter(server, {"status": state}, max_retries=PATIENCE)
        return found

    def boot_many(self, least: int, most: int, state: str = "ACTIVE", **wanted: Any) -> list[Server]:
        """Servers of one request."""
        name = f"many-{least}-{most}"
        self.request(name=name, min_count=least, max_count=most, **wanted)
        found = [one for one in self.api.get_servers(detail=True) if one["name"].startswith(name)]
        return [self.settled(one, state) for one in found]

    def at_once(self, number: int, flavor: str, group: str | None = None) -> list[Server]:
        """Servers that were asked for by as many threads."""
        made: list[Server] = []
        hints = {"group": group} if group else None
        threads = [
            threading.Thread(target=lambda: made.append(self.request(flavor=flavor, hints=hints)))
            for _ in range(number)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    def group(self, policy: str, **rules: int) -> str:
        """The id of a new server group."""
        wanted = {"name": policy, "policy": policy} | ({"rules": rules} if rules else {})
        made: str = self.api.post_server_groups(wanted)["id"]
        return made

    def member(self, group: str, state: str = "ACTIVE", **wanted: Any) -> Server:
        """A server of a group, which the group then names."""
        server = self.boot(state, hints={"group": group}, **wanted)
        self.assertIn(server["id"], self.api.get_server_group(group)["members"])
        return server

    def act(self, server: Server, **action: Any) -> None:
        """An action by its name, `_` for `-`."""
        ((name, body),) = action.items()
        self.api.post_server_action(server["id"], {name.replace("_", "-"): body})

    # --- what an operator does

    def zone(self, name: str, *hosts: str, **metadata: str) -> None:
        """An aggregate that is a zone, or with metadata alone."""
        aggregate = self.api.post_aggregate({"aggregate": {"name": name}})["id"]
        for host in hosts:
            self.api.add_host_to_aggregate(aggregate, host)
        values = metadata or {"availability_zone": name}
        self.api.post_aggregate_action(aggregate, {"set_metadata": {"metadata": values}})

    def service(self, host: str, **values: Any) -> None:
        """Change a compute service: status, forced_down."""
        found = self.api.get_services(binary="nova-compute", host=host)[0]["id"]
        self.api.put_service(found, values)

    def fill(self, host: str, memory_mb: int = MEMORY_MB) -> Server:
        """Take all of a host's memory."""
        return self.boot(flavor=self.flavor(memory_mb=memory_mb, disk_gb=0), host=host)

    def trait(self, host: str, name: str) -> None:
        """Give a host a trait of the operator's own."""
        self._create_trait(name)
        uuid = self._get_provider_uuid_by_host(host)
        self._set_provider_traits(uuid, [*self._get_provider_traits(uuid), name])

    # --- what is asserted

    def host(self, server: Server) -> str:
        """Where Nova says that it is."""
        found: str = self.api.get_server(server["id"])["OS-EXT-SRV-ATTR:host"]
        return found

    def claims(self, consumer: str) -> dict[str, dict[str, int]]:
        """{host: resources} that a consumer holds."""
        held = self.placement.get(f"/allocations/{consumer}", version="1.28").body["allocations"]
        names = {self._get_provider_uuid_by_host(host): host for host in self.hosts}
        return {names[provider]: one["resources"] for provider, one in held.items()}

    def assert_claimed(self, server: Server, host: str | None = None) -> None:
        """It holds what its flavor says, on the host where it is and nowhere else."""
        where = self.host(server)
        if host is not None:
            self.assertEqual(host, where)
        flavor = self.api.get_server(server["id"])["flavor"]
        wanted = {"VCPU": flavor["vcpus"], "MEMORY_MB": flavor["ram"], "DISK_GB": flavor["disk"]}
        held = self.claims(server["id"])
        self.assertEqual([where], list(held))
        self.assertEqual(
            {name: amount for name, amount in wanted.items() if amount},
            {name: amount for name, amount in held[where].items() if name in wanted},
        )

    def moved(self, server: Server, source: str, host: str | None = None) -> Server:
        """It left the source, to the host where one is named, and holds nothing where it was."""
        now: Server = self._wait_for_state_change(server, "ACTIVE")
        self.assertNotEqual(source, self.host(now))
        self.assert_claimed(now, host)
        self.assertNotIn("fault", now)
        return now

    def in_cell(self, server: Server) -> str:
        """The cell that Nova has the instance in."""
        mapping = objects.InstanceMapping.get_by_instance_uuid(context.get_admin_context(), server["id"])
        return str(mapping.cell_mapping.name)
