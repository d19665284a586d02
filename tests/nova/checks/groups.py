"""Checks of server groups."""

from __future__ import annotations

from tests.nova.checks.cloud import HOSTS, MEMORY_MB, Cloud


class Groups(Cloud):
    """Members of a group, and who of them is where."""

    def test_affinity(self) -> None:
        group = self.group("affinity")
        self.assertEqual(1, len({self.host(self.member(group)) for _ in range(3)}))

    def test_affinity_with_a_full_host(self) -> None:
        group = self.group("affinity")
        first = self.member(group)
        self.fill(self.host(first), MEMORY_MB - 512)
        self.member(group, "ERROR")

    def test_anti_affinity(self) -> None:
        group = self.group("anti-affinity")
        self.assertEqual(set(HOSTS), {self.host(self.member(group)) for _ in HOSTS})

    def test_anti_affinity_with_too_few_hosts(self) -> None:
        group = self.group("anti-affinity")
        for _ in HOSTS:
            self.member(group)
        self.member(group, "ERROR")

    def test_a_deleted_member_makes_room(self) -> None:
        group = self.group("anti-affinity")
        members = [self.member(group) for _ in HOSTS]
        freed = self.host(members[0])
        self._delete_server(members[0])
        self.assertEqual(freed, self.host(self.member(group)))

    def test_two_to_a_host(self) -> None:
        group = self.group("anti-affinity", max_server_per_host=2)
        hosts = [self.host(self.member(group)) for _ in range(6)]
        self.assertEqual(dict.fromkeys(HOSTS, 2), {host: hosts.count(host) for host in HOSTS})
        self.member(group, "ERROR")

    def test_anti_affinity_in_one_request(self) -> None:
        group = self.group("anti-affinity")
        made = self.boot_many(3, 3, hints={"group": group})
        self.assertEqual(set(HOSTS), {self.host(one) for one in made})

    def test_affinity_in_one_request(self) -> None:
        group = self.group("affinity")
        self.assertEqual(1, len({self.host(one) for one in self.boot_many(3, 3, hints={"group": group})}))

    def test_soft_affinity_goes_elsewhere_when_it_must(self) -> None:
        group = self.group("soft-affinity")
        first = self.member(group)
        self.fill(self.host(first), MEMORY_MB - 512)
        self.assertNotEqual(self.host(first), self.host(self.member(group)))

    def test_soft_anti_affinity_shares_when_it_must(self) -> None:
        group = self.group("soft-anti-affinity")
        self.assertEqual(4, len([self.member(group) for _ in range(4)]))

    def test_a_member_migrates_to_a_host_without_one(self) -> None:
        group = self.group("anti-affinity")
        first, second = self.member(group), self.member(group)
        source, other = self.host(first), self.host(second)
        self.act(first, migrate=None)
        self._wait_for_state_change(first, "VERIFY_RESIZE")
        self._confirm_resize(first)
        (free,) = set(HOSTS) - {source, other}
        self.moved(first, source, free)


class FourAtOnce(Cloud):
    """Four members of an anti-affinity group, asked for at the same moment, on four hosts."""

    hosts = ("host1", "host2", "host3", "host4")

    def test_no_member_is_lost(self) -> None:
        for number in range(10):
            made = self.at_once(len(self.hosts), self.flavor(memory_mb=64), self.group("anti-affinity"))
            where = [self.host(self.settled(one)) for one in made]
            self.assertEqual(sorted(self.hosts), sorted(where), f"round {number}")
            for one in made:
                self._delete_server(one)
