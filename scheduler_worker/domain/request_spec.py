"""One build request as the decision sees it: the query for the replica, and what filters and weighers read."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.groups import GroupPolicy, ServerGroup
from placement_worker.replica.search import Query


class Peers(Struct, frozen=True, kw_only=True):
    """The instances that a request is placed relative to, and the hosts (uuids) that they are on.

    server_group: the group of the request. members: {host: other members of the group there}. different_hosts,
    same_hosts: the hosts of the instances that the hints `different_host` and `same_host` name; None: no such hint.
    """

    server_group: ServerGroup | None = None
    members: Mapping[str, int] = {}
    different_hosts: tuple[str, ...] | None = None
    same_hosts: tuple[str, ...] | None = None


class RequestSpec(Struct, frozen=True, kw_only=True):
    """A request with its flavor and the pre-filters applied. Requests with an equal `key` share one ranking.

    preferred_traits, preferred_classes: what the flavor prefers and does not require; a weigher reads them.
    peers: where the instances are that the request names, if it names any. image_properties: as the image has them.
    forced: no filter is run; pre-filters and the claim are. cell: only hosts of this one, where an instance moves.
    """

    query: Query
    flavor: str
    project_id: str
    extra_specs: Mapping[str, str] = {}
    availability_zone: str | None = None
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    peers: Peers | None = None
    image_properties: Mapping[str, str] = {}
    forced: bool = False
    cell: str | None = None

    def has_policy(self, policy: GroupPolicy) -> bool:
        """Whether the request belongs to a server group with this policy."""
        group = self.peers.server_group if self.peers is not None else None
        return group is not None and group.policy is policy

    def with_peers(self, peers: Peers, instance_uuid: str) -> RequestSpec:
        """The same with these peers. The key becomes the request's own: its ranking is shared with no other."""
        return replace(self, peers=peers, key=(*self.key, instance_uuid))

    def without_peers(self) -> RequestSpec:
        """The same before `with_peers`: its ranking is shared with requests that have other peers, or none."""
        return self if self.peers is None else replace(self, peers=None, key=self.key[:-1])

    def with_members(self, members: Mapping[str, int]) -> RequestSpec:
        """The same, after newer counts of the server group's members on some hosts."""
        if self.peers is None:
            return self
        return replace(self, peers=replace(self.peers, members={**self.peers.members, **members}))


class Unsatisfiable(Struct, frozen=True):
    """No host can take the request under the present configuration; `code` is stable, `reason` for a person."""

    code: str
    reason: str
    step: str
