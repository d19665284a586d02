"""Checks of boots: where a server goes, what it holds, and what Nova says when it goes nowhere."""

from __future__ import annotations

from tests.nova.checks.cloud import HOSTS, Cloud


class Boots(Cloud):
    """One server at a time."""

    def test_a_boot_ends_on_a_host_that_it_has_claimed(self) -> None:
        server = self.boot()
        self.assertIn(self.host(server), HOSTS)
        self.assertEqual("cell1", self.in_cell(server))

    def test_flavors_are_claimed_as_they_are(self) -> None:
        for shape in ((1, 64, 0), (2, 2048, 20), (10, 4096, 500)):
            self.boot(flavor=self.flavor(*shape))

    def test_a_deleted_server_holds_nothing(self) -> None:
        server = self.boot()
        self._delete_server(server)
        self.assertEqual({}, self.claims(server["id"]))

    def test_the_last_place_is_found(self) -> None:
        for host in ("host1", "host3"):
            self.fill(host)
        self.assertEqual("host2", self.host(self.boot()))

    def test_a_full_cloud_says_no_valid_host(self) -> None:
        for host in HOSTS:
            self.fill(host)
        self.boot("ERROR")

    def test_freed_place_is_used_again(self) -> None:
        fillers = [self.fill(host) for host in HOSTS]
        self._delete_server(fillers[1])
        self.assertEqual("host2", self.host(self.boot()))

    def test_too_many_vcpus(self) -> None:
        self.boot("ERROR", flavor=self.flavor(vcpus=11))

    def test_too_much_memory(self) -> None:
        self.boot("ERROR", flavor=self.flavor(memory_mb=9000))

    def test_too_much_disk(self) -> None:
        self.boot("ERROR", flavor=self.flavor(disk_gb=2000))

    def test_a_disabled_host_is_left_out(self) -> None:
        for host in ("host1", "host2"):
            self.service(host, status="disabled")
        self.assertEqual("host3", self.host(self.boot()))

    def test_an_enabled_host_is_used_again(self) -> None:
        for host in HOSTS:
            self.service(host, status="disabled")
        self.boot("ERROR")
        self.service("host2", status="enabled")
        self.assertEqual("host2", self.host(self.boot()))

    def test_a_host_that_is_down_is_left_out(self) -> None:
        for host in ("host1", "host2"):
            self.service(host, forced_down=True)
        self.assertEqual("host3", self.host(self.boot()))

    def test_no_host_is_up(self) -> None:
        for host in HOSTS:
            self.service(host, forced_down=True)
        self.boot("ERROR")

    def test_a_required_trait(self) -> None:
        self.trait("host2", "CUSTOM_GOLD")
        self.assertEqual("host2", self.host(self.boot(flavor=self.flavor(trait_CUSTOM_GOLD="required"))))

    def test_a_forbidden_trait(self) -> None:
        for host in ("host1", "host3"):
            self.trait(host, "CUSTOM_OLD") if host == "host1" else self.service(host, status="disabled")
        self.assertEqual("host2", self.host(self.boot(flavor=self.flavor(trait_CUSTOM_OLD="forbidden"))))

    def test_a_trait_that_nobody_has(self) -> None:
        self._create_trait("CUSTOM_NOBODY")
        self.boot("ERROR", flavor=self.flavor(trait_CUSTOM_NOBODY="required"))

    def test_a_resource_class_of_the_operator(self) -> None:
        self._create_resource_class("CUSTOM_TOKEN")
        self._set_inventory_of("host3")
        server = self.boot(flavor=self.flavor(resources_CUSTOM_TOKEN=2))
        self.assertEqual(2, self.claims(server["id"])["host3"]["CUSTOM_TOKEN"])

    def _set_inventory_of(self, host: str) -> None:
        uuid = self._get_provider_uuid_by_host(host)
        now = self.placement.get(f"/resource_providers/{uuid}/inventories").body
        now["inventories"]["CUSTOM_TOKEN"] = {"total": 4}
        self.placement.put(f"/resource_providers/{uuid}/inventories", now, version="1.26")


class Where(Cloud):
    """A host or a zone that the request names."""

    def test_a_zone(self) -> None:
        self.zone("zone2", "host2")
        for _ in range(2):
            self.assertEqual("host2", self.host(self.boot(availability_zone="zone2")))

    def test_the_default_zone_rules_nothing_out(self) -> None:
        """It is the metadata of no aggregate, and Nova has no other filter of zones any more."""
        for host in HOSTS[1:]:
            self.zone(f"zone-{host}", host)
        self.assertIn(self.host(self.boot(availability_zone="nova")), HOSTS)

    def test_a_full_zone(self) -> None:
        self.zone("zone1", "host1")
        self.fill("host1")
        self.boot("ERROR", availability_zone="zone1")

    def test_a_host_that_joins_a_zone(self) -> None:
        self.zone("zone1", "host1", "host3")
        self.fill("host1")
        self.assertEqual("host3", self.host(self.boot(availability_zone="zone1")))

    def test_a_forced_host(self) -> None:
        for host in HOSTS:
            self.assertEqual(host, self.host(self.boot(availability_zone=f"nova:{host}")))

    def test_a_forced_node(self) -> None:
        self.assertEqual("host2", self.host(self.boot(availability_zone="nova:host2:host2")))

    def test_a_forced_host_that_is_full(self) -> None:
        self.fill("host1")
        self.boot("ERROR", availability_zone="nova:host1")

    def test_a_requested_host(self) -> None:
        self.assertEqual("host3", self.host(self.boot(host="host3")))

    def test_a_requested_host_that_is_full(self) -> None:
        self.fill("host2")
        self.boot("ERROR", host="host2")

    def test_a_requested_host_that_is_disabled(self) -> None:
        self.service("host1", status="disabled")
        self.boot("ERROR", host="host1")

    def test_a_requested_hypervisor(self) -> None:
        self.assertEqual("host2", self.host(self.boot(hypervisor_hostname="host2")))


class Hints(Cloud):
    """Other servers that the request names. Nova's own list of filters leaves these two out."""

    def setUp(self) -> None:
        self.flags(enabled_filters=["ComputeFilter", "SameHostFilter", "DifferentHostFilter"], group="filter_scheduler")
        super().setUp()

    def test_the_same_host(self) -> None:
        first = self.boot(host="host2")
        self.assertEqual("host2", self.host(self.boot(hints={"same_host": [first["id"]]})))

    def test_the_same_host_is_full(self) -> None:
        first = self.fill("host2")
        self.boot("ERROR", hints={"same_host": [first["id"]]})

    def test_a_different_host(self) -> None:
        others = [self.boot(host=host)["id"] for host in ("host1", "host3")]
        self.assertEqual("host2", self.host(self.boot(hints={"different_host": others})))

    def test_no_different_host(self) -> None:
        others = [self.boot(host=host)["id"] for host in HOSTS]
        self.boot("ERROR", hints={"different_host": others})


class Many(Cloud):
    """Several servers of one request, and quotas."""

    def test_three_at_once(self) -> None:
        self.assertEqual(3, len(self.boot_many(3, 3)))

    def test_as_many_as_asked_for_at_most(self) -> None:
        self.assertEqual(5, len(self.boot_many(2, 5)))

    def test_more_than_fit_are_none(self) -> None:
        big = self.flavor(vcpus=10, memory_mb=7000)
        self.assertEqual(10, len(self.boot_many(10, 10, "ERROR", flavor=big)))

    def test_the_quota_of_servers(self) -> None:
        self.flags(instances=2, group="quota")
        self.assertEqual(2, len(self.boot_many(1, 4)))

    def test_the_quota_of_cores(self) -> None:
        self.flags(cores=4, group="quota")
        self.boot(flavor=self.flavor(vcpus=3))
        with self.assertRaisesRegex(Exception, "Quota exceeded for cores"):
            self.request(flavor=self.flavor(vcpus=2))
