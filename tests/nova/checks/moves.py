"""Checks of moves: where a server goes, who holds what while it moves, and what is left behind."""

from __future__ import annotations

from tests.nova.checks.cloud import HOSTS, IMAGE, OTHER_IMAGE, Cloud, Server


class Resizes(Cloud):
    """Resize and cold migration."""

    def resized(self, **more: str) -> tuple[Server, str]:
        """A server between its two hosts, and where it was."""
        server = self.boot()
        source = self.host(server)
        self.act(server, resize={"flavorRef": self.flavor(vcpus=2, memory_mb=1024)})
        self._wait_for_state_change(server, "VERIFY_RESIZE")
        self.assertIn(source, self.claims(self.get_migration_uuid_for_instance(server["id"])))
        self.assert_claimed(server)
        return server, source

    def test_a_resize_is_confirmed(self) -> None:
        server, source = self.resized()
        self._confirm_resize(server)
        self.moved(server, source)

    def test_a_resize_is_reverted(self) -> None:
        server, source = self.resized()
        self._revert_resize(server)
        self.assert_claimed(server, source)

    def test_a_resize_that_fits_nowhere(self) -> None:
        server = self.boot()
        source = self.host(server)
        self.act(server, resize={"flavorRef": self.flavor(vcpus=11)})
        self._assert_resize_migrate_action_fail(server, "resize", "NoValidHost")
        self.assert_claimed(server, source)

    def test_a_resize_on_the_same_host(self) -> None:
        self.flags(allow_resize_to_same_host=True)
        for host in ("host2", "host3"):
            self.service(host, status="disabled")
        server = self.boot()
        self.act(server, resize={"flavorRef": self.flavor(vcpus=2)})
        self._wait_for_state_change(server, "VERIFY_RESIZE")
        self._confirm_resize(server)
        self.assert_claimed(server, "host1")

    def test_a_migration_is_confirmed(self) -> None:
        server = self.boot()
        source = self.host(server)
        self._migrate_server(server)
        self._confirm_resize(server)
        self.moved(server, source)

    def test_a_migration_is_reverted(self) -> None:
        server = self.boot()
        source = self.host(server)
        self._migrate_server(server)
        self._revert_resize(server)
        self.assert_claimed(server, source)

    def test_a_migration_to_a_host(self) -> None:
        server = self.boot(host="host1")
        self._migrate_server(server, host="host3")
        self._confirm_resize(server)
        self.moved(server, "host1", "host3")

    def test_a_migration_that_fits_nowhere(self) -> None:
        server = self.boot(host="host1")
        for host in ("host2", "host3"):
            self.fill(host)
        self.act(server, migrate=None)
        self._assert_resize_migrate_action_fail(server, "migrate", "NoValidHost")
        self.assert_claimed(server, "host1")

    def test_a_migration_stays_in_its_zone(self) -> None:
        self.zone("zone1", "host1", "host3")
        server = self.boot(availability_zone="zone1")
        source = self.host(server)
        self._migrate_server(server)
        self._confirm_resize(server)
        self.moved(server, source, "host3" if source == "host1" else "host1")


class Live(Cloud):
    """Live migration and evacuation."""

    def test_a_live_migration(self) -> None:
        server = self.boot()
        source = self.host(server)
        self._live_migrate(server)
        self.moved(server, source)

    def test_a_live_migration_to_a_host(self) -> None:
        server = self.boot(host="host1")
        self._live_migrate(server, host="host2")
        self.moved(server, "host1", "host2")

    def test_a_live_migration_to_a_full_host(self) -> None:
        server = self.boot(host="host1")
        self.fill("host2")
        self.act(server, os_migrateLive={"host": "host2", "block_migration": "auto"})
        self._wait_for_migration_status(server, ["error"])
        self.assert_claimed(server, "host1")

    def test_a_live_migration_that_fits_nowhere(self) -> None:
        server = self.boot(host="host1")
        for host in ("host2", "host3"):
            self.fill(host)
        self.act(server, os_migrateLive={"host": None, "block_migration": "auto"})
        self._wait_for_migration_status(server, ["error"])
        self.assert_claimed(server, "host1")

    def evacuated(self, source: str, server: Server, **to: str) -> str:
        """Where a server came up again whose host is down."""
        self.computes[source].stop()
        self.service(source, forced_down=True)
        self._evacuate_server(server, extra_post_args=to)
        where = self.host(server)
        self.assertNotEqual(source, where)
        self.assertIn(where, self.claims(server["id"]))
        return where

    def test_an_evacuation(self) -> None:
        self.evacuated("host1", self.boot(host="host1"))

    def test_an_evacuation_to_a_host(self) -> None:
        self.assertEqual("host3", self.evacuated("host1", self.boot(host="host1"), host="host3"))

    def test_an_evacuation_keeps_its_group_apart(self) -> None:
        group = self.group("anti-affinity")
        first, second = self.member(group), self.member(group)
        (free,) = set(HOSTS) - {self.host(first), self.host(second)}
        self.assertEqual(free, self.evacuated(self.host(first), first))


class Shelved(Cloud):
    """Shelving, unshelving and rebuilding."""

    def test_a_shelved_server_holds_nothing(self) -> None:
        server = self.boot()
        self._shelve_server(server)
        self.assertEqual({}, self.claims(server["id"]))

    def test_unshelved(self) -> None:
        server = self.boot()
        self._shelve_server(server)
        self.assert_claimed(self._unshelve_server(server))

    def test_unshelved_elsewhere(self) -> None:
        server = self.boot(host="host1")
        self._shelve_server(server)
        self.service("host1", status="disabled")
        self.assertIn(self.host(self._unshelve_server(server)), {"host2", "host3"})

    def test_unshelved_to_a_host(self) -> None:
        server = self.boot()
        self._shelve_server(server)
        self.act(server, unshelve={"host": "host3"})
        self.settled(server)
        self.assert_claimed(server, "host3")

    def test_unshelved_in_a_zone(self) -> None:
        self.zone("zone2", "host2")
        server = self.boot()
        self._shelve_server(server)
        self.act(server, unshelve={"availability_zone": "zone2"})
        self.settled(server)
        self.assert_claimed(server, "host2")

    def test_rebuilt_with_the_same_image(self) -> None:
        server = self.boot(host="host2")
        self._rebuild_server(server, IMAGE)
        self.assert_claimed(server, "host2")

    def test_rebuilt_with_a_new_image(self) -> None:
        server = self.boot(host="host2")
        self._rebuild_server(server, OTHER_IMAGE)
        self.assert_claimed(server, "host2")

    def test_rebuilt_on_a_disabled_host(self) -> None:
        server = self.boot(host="host2")
        self.service("host2", status="disabled")
        self._rebuild_server(server, OTHER_IMAGE)
        self.assert_claimed(server, "host2")
