"""Settings of one gateway process."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Word

MAX_PROJECTS = 500  # each has connections of its own


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one gateway process."""

    url: str = ""
    """The clients' broker: as `bus.url`, without a virtual host; each project has one of its own, `client.PROJECT`.
    Empty: the API bus's broker, which is for trials: there a project is isolated by its limits only.
    """
    projects: Annotated[tuple[Word, ...], Bound(max_length=MAX_PROJECTS)] = ()
    """The projects whose clients come in by the gateways. The settings file is read again every 30 s, so a project can
    be added or removed while they run.
    """
