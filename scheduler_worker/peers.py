"""Asks the book where those are that a request wants to be with or apart from, before anything is decided.

What it says may be old by the time of the claim: fine for hints and wishes, and hard rules are held to by the claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.bus import Bus
from bus.contracts.build import BuildRequest
from bus.contracts.placement import WherePage, WhereRequest
from bus.faults import Fault, Transient
from bus.port import BusError
from scheduler_worker.domain.request_spec import Peers
from scheduler_worker.endings import Away, Work


async def look_up(bus: Bus, works: Sequence[Work], *, timeout_s: float) -> None:
    """Tell each request of company where its company is; without an answer it ends Away, and is tried again."""
    asking = [work for work in works if names_others(work.request)]
    if not asking:
        return
    try:
        pages = await bus.request_all(
            [_question(work.request) for work in asking],
            WherePage,
            timeout_s=timeout_s,
            causes=[work.request.instance_uuid for work in asking],
        )
    except (BusError, Transient) as error:
        for work in asking:
            work.ending = Away(str(error))
        return
    for work, page in zip(asking, pages, strict=True):
        if isinstance(page, Fault):
            work.ending = Away(f"{page.code} {page.reason}".strip())
        else:
            work.spec = work.spec.with_peers(company(work.request, page), work.request.instance_uuid)


def names_others(request: BuildRequest) -> bool:
    """Whether it matters to the request where others are."""
    return bool(request.server_group or request.different_host or request.same_host)


def company(request: BuildRequest, page: WherePage) -> Peers:
    """What the book said, in the request's terms."""
    return Peers(
        server_group=request.server_group,
        members=page.members,
        different_hosts=_hosts(page, request.different_host) if request.different_host else None,
        same_hosts=_hosts(page, request.same_host) if request.same_host else None,
    )


def _hosts(page: WherePage, instances: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for one in instances for host in page.hosts.get(one, ())))


def _question(request: BuildRequest) -> WhereRequest:
    return WhereRequest(
        project_id=request.project_id,
        server_group=request.server_group.uuid if request.server_group is not None else None,
        besides=request.instance_uuid,
        consumers=tuple(dict.fromkeys((*request.different_host, *request.same_host))),
    )
