"""One build request as the decision sees it: what to search for, and what the filters may ask about."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.groups import GroupPolicy, ServerGroup
from placement_worker.replica.search import Query


class Company(Struct, frozen=True, kw_only=True):
    """Whom a request wants to be with or apart from, and where those are: hosts by uuid.

    members: how many others of the server group each host has. apart_from, together_with: of the hints; None: no hint.
    """

    server_group: ServerGroup | None = None
    members: Mapping[str, int] = {}
    apart_from: tuple[str, ...] | None = None
    together_with: tuple[str, ...] | None = None


class Wanted(Struct, frozen=True, kw_only=True):
    """What is wanted. Requests with an equal `key` see the same hosts in the same light and share one ranking.

    preferred_traits, preferred_classes: what the flavor would like and does not insist on; a weigher looks at them.
    company: what the book says of those that the request names, if it names any. image_properties: what the image says.
    forced: no filter is asked; the book is.
    """

    query: Query
    flavor: str
    project_id: str
    extra_specs: Mapping[str, str] = {}
    availability_zone: str | None = None
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    company: Company | None = None
    image_properties: Mapping[str, str] = {}
    forced: bool = False

    def has_policy(self, policy: GroupPolicy) -> bool:
        """Whether it belongs to a server group with this policy."""
        group = self.company.server_group if self.company is not None else None
        return group is not None and group.policy is policy

    def in_company(self, company: Company, instance_uuid: str) -> Wanted:
        """The same, with these others around: it sees its hosts in a light of its own."""
        return replace(self, company=company, key=(*self.key, instance_uuid))

    def meeting(self, members: Mapping[str, int]) -> Wanted:
        """The same, after newer word of where the server group is."""
        return self if self.company is None else replace(self, company=replace(self.company, members=members))


class Impossible(Struct, frozen=True):
    """No host can ever be asked for this as things are configured; `code` is stable, `reason` for a person."""

    code: str
    reason: str
    step: str
