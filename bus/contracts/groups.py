"""Server groups: which instances want to be together or apart. Named in requests, enforced in claims."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from .base import Uuid


class GroupPolicy(StrEnum):
    """The rule for the hosts of a group's members. The soft rules are weights, not filters."""

    AFFINITY = "affinity"
    ANTI_AFFINITY = "anti-affinity"
    SOFT_AFFINITY = "soft-affinity"
    SOFT_ANTI_AFFINITY = "soft-anti-affinity"


class ServerGroup(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The group that an instance belongs to; it is of the instance's project, and exists by being named.

    A field that does not exist is refused by name, between workers too: an older worker that ignored a newer field of a
    rule would break the rule.

    max_per_host: with anti-affinity, this many members may share a host (Nova's max_server_per_host).
    """

    uuid: Uuid
    policy: GroupPolicy
    max_per_host: Annotated[int, Bound(ge=1, le=1000)] = 1
