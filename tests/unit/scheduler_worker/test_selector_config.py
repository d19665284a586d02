"""A configuration in use: what may be requested, and which requests share a ranking."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from bus.contracts.objects import GroupDefinition
from bus.contracts.placement import GroupPolicy, ServerGroup
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult, is_own, reads_image_property
from scheduler_worker.selection.request_spec import RelatedInstances, RequestSpec, Unsatisfiable
from scheduler_worker.selection.selector_config import ANTI_AFFINITY_FILTER, SelectorConfig
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

UUID = "a0000000-0000-4000-8000-000000000001"


class Operators:
    """An operator's own filter."""

    name: ClassVar[str] = "Operators"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        raise AssertionError("no host is looked for")


GROUP = ServerGroup(uuid=UUID, policy=GroupPolicy.ANTI_AFFINITY)


@pytest.mark.parametrize(
    ("related", "forced", "filters", "shares"),
    [
        ({}, False, "own", True),
        ({}, True, "own", False),
        ({"server_group": replace(GROUP, policy=GroupPolicy.AFFINITY)}, False, "own", False),
        ({"server_group": None}, False, "own", False),
        ({"different_hosts": ()}, False, "own", False),
        ({"same_hosts": ()}, False, "own", False),
        ({}, False, "operators", False),
        ({}, False, "others", False),
    ],
)
def test_which_requests_of_a_group_share_a_ranking(related: Any, forced: bool, filters: str, shares: bool) -> None:
    config = SchedulerConfig()
    if filters == "others":
        kept = tuple(one for one in config.enabled_filters if not one.endswith(ANTI_AFFINITY_FILTER))
        config = replace(config, enabled_filters=kept)
    hosts = Hosts([PLENTY], config=config)
    if filters == "operators":
        hosts.selector.config = SelectorConfig(
            config, flavors=hosts.selector.config.flavors, filters=[*hosts.selector.config.filters, Operators()],
            weighings=hosts.selector.config.weighings,
        )  # fmt: skip
    spec = replace(hosts.spec(), related=RelatedInstances(**{"server_group": GROUP, **related}), forced=forced)
    assert hosts.selector.config.may_share_ranking(spec) is shares


def test_what_a_project_may_request() -> None:
    config = SchedulerConfig(
        flavors={"a": Flavor(vcpus=1), "b": Flavor(vcpus=1, projects=("p",))},
        groups={f"{project}/g": GroupDefinition(policy=GroupPolicy.AFFINITY) for project in "pq"},
    )
    known = Hosts([PLENTY], config=config).selector.config
    assert [known.allows(*one) for one in (("a", "q"), ("b", "q"), ("b", "p"), ("c", "p"))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert [known.flavors_for(project)[-2:] for project in "pq"] == [("a", "b"), ("bm.silver", "a")]
    mine, other = known.group_of("p", "g"), known.group_of("p", "x")
    assert mine is not None and other is None
    assert known.group_by_uuid("p", mine.uuid) == ("p/g", mine)
    assert known.group_by_uuid("q", mine.uuid) is None


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        ({"flavor": "none"}, "flavor.unknown"),
        ({"group": "g"}, "group.unknown"),
        ({"group": "g", "server_group": GROUP}, None),
        ({"host": "nowhere"}, "host.unknown"),
        ({"host": "h0"}, None),
        ({}, None),
    ],
)
def test_which_requests_can_be_placed(request_of: dict[str, Any], code: str | None) -> None:
    hosts = Hosts([PLENTY])
    found = hosts.selector.request_spec(hosts.request(**request_of))
    assert (found.code if isinstance(found, Unsatisfiable) else None) == code


class Reading(Operators):
    __module__ = "scheduler_worker.filters.reading"

    def reads_image_property(self, name: str, _: object) -> bool:
        return name == "read"


def test_requests_share_a_ranking_whose_images_differ_in_what_no_filter_reads() -> None:
    def keys(*filters: Any) -> list[tuple[str, ...]]:
        hosts = Hosts([PLENTY], filters=filters)
        images: tuple[dict[str, str], ...] = ({}, {"read": "1"}, {"read": "2"}, {"else": "1"})
        return [hosts.spec(image_properties=image).key for image in images]

    plain, one, two, other = keys(Reading())
    assert plain == other and len({plain, one, two}) == 3
    assert len(set(keys())) == 1, "no filter reads any"
    assert len(set(keys(Operators()))) == 4, "an operator's own may read all"
    assert (is_own(Reading()), is_own(Operators())) == (True, False)
    assert [reads_image_property(Reading(), name, None) for name in ("read", "x")] == [True, False]  # type: ignore[arg-type]
    assert not reads_image_property(Operators(), "read", None)  # type: ignore[arg-type]
    hosts = Hosts([PLENTY])
    before = hosts.spec().key
    flavors = hosts.selector.config.flavors
    hosts.selector.config = SelectorConfig(hosts.config, flavors=flavors, filters=(), weighings=(), revision=1)
    assert hosts.spec().key != before, "read under another revision"
