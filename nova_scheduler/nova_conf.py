"""A nova.conf as settings of berth: the options that decide where Nova's scheduler is reached and whom it chooses."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, inspect

from bus.contracts.base import reason_of
from bus.faults import Fault
from nova_scheduler.config import NOT_OWNED, NovaConfig, PrefilterSettings
from nova_scheduler.wire.queues import RabbitOptions
from scheduler_worker import plugins
from scheduler_worker.config import HOST_FACT_FILTERS, SchedulerConfig

MAX_BYTES: Final = 2**20
MAX_SHOWN: Final = 200  # characters of a name that a file has
GROUPS: Final = ("scheduler", "filter_scheduler", "metrics")  # of which each option is translated or named

Name = tuple[str, str]  # group, option
Path = tuple[str, ...]  # of a setting, from [nova] or [scheduler] on

_ROOTS: Final[Mapping[str, type[Struct]]] = {"nova": NovaConfig, "scheduler": SchedulerConfig}
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "on", "yes"), True),
    **dict.fromkeys(("false", "0", "off", "no"), False),
}
OF_NOVA: Final = "nova.scheduler.weights."
_REFERS = re.compile(r"(?<![\\$])\$(?!\$)")  # to another option
_DOLLAR = re.compile(r"\\\$|\$\$")
_QUOTED = re.compile(r"(['\"])(.*)\1")
_PREFILTER_GROUPS: Final = {"pci_in_placement": "filter_scheduler", "disable_fallback_pcpu_query": "workarounds"}

TRANSLATED: Final[Mapping[Name, Path]] = {
    ("DEFAULT", "transport_url"): ("nova", "transport_url"),
    ("DEFAULT", "control_exchange"): ("nova", "control_exchange"),
    ("DEFAULT", "host"): ("nova", "host"),
    ("DEFAULT", "default_availability_zone"): ("nova", "default_availability_zone"),
    ("api_database", "connection"): ("nova", "api", "cells_database"),
    ("filter_scheduler", "enabled_filters"): ("nova", "enabled_filters"),
    ("filter_scheduler", "image_properties_default_architecture"): ("nova", "image_properties_default_architecture"),
    ("filter_scheduler", "host_subset_size"): ("scheduler", "host_subset_size"),
    ("filter_scheduler", "shuffle_best_same_weighed_hosts"): ("scheduler", "shuffle_best_same_weighed_hosts"),
    ("compute", "packing_host_numa_cells_allocation_strategy"): (
        "nova",
        "packing_host_numa_cells_allocation_strategy",
    ),
    ("scheduler", "max_attempts"): ("scheduler", "max_attempts"),
    ("notifications", "notification_format"): ("nova", "notifications", "notification_format"),
    ("notifications", "versioned_notifications_topics"): ("nova", "notifications", "versioned_notifications_topics"),
    **{
        ("filter_scheduler", f"{name}_weight_multiplier"): ("scheduler", "multipliers", name)
        for name in (
            *("ram", "cpu", "disk", "soft_affinity", "soft_anti_affinity"),
            *("build_failure", "io_ops", "num_instances", "hypervisor_version", "pci"),
        )
    },
    **{
        ("filter_scheduler", name): ("scheduler", name)
        for name in (
            "max_io_ops_per_host",
            "max_instances_per_host",
            "isolated_images",
            "isolated_hosts",
            "restrict_isolated_hosts_to_isolated_images",
        )
    },
    ("metrics", "weight_multiplier"): ("scheduler", "multipliers", "metrics"),
    ("metrics", "weight_setting"): ("scheduler", "metrics", "weights"),
    ("metrics", "required"): ("scheduler", "metrics", "required"),
    ("metrics", "weight_of_unavailable"): ("scheduler", "metrics", "weight_of_unavailable"),
    **{
        (_PREFILTER_GROUPS.get(name, "scheduler"), name): ("nova", "prefilters", name)
        for name in PrefilterSettings.__struct_fields__
    },
    **{("oslo_messaging_rabbit", name): ("nova", "rabbit", name) for name in RabbitOptions.__struct_fields__},
}

# The weighers that Nova and berth have, by the class's name, with their multiplier's.
WEIGHERS: Final[Mapping[str, str]] = {
    "RAMWeigher": "ram",
    "CPUWeigher": "cpu",
    "DiskWeigher": "disk",
    "IoOpsWeigher": "io_ops",
    "NumInstancesWeigher": "num_instances",
    "HypervisorVersionWeigher": "hypervisor_version",
    "BuildFailureWeigher": "build_failure",
    "MetricsWeigher": "metrics",
    "PCIWeigher": "pci",
    "ServerGroupSoftAffinityWeigher": "soft_affinity",
    "ServerGroupSoftAntiAffinityWeigher": "soft_anti_affinity",
}
WEIGHT_CLASSES: Final[Name] = ("filter_scheduler", "weight_classes")
# Values that say what is so here without a setting.
DEFAULTS: Final[Mapping[Name, str]] = {
    WEIGHT_CLASSES: "nova.scheduler.weights.all_weighers",
    ("filter_scheduler", "available_filters"): "nova.scheduler.filters.all_filters",
}
_NO_WEIGHER: Final = "read by a weigher that berth does not have"
UNTRANSLATED: Final[Mapping[Name, str]] = {
    ("scheduler", "workers"): "start as many processes of berth",
    ("scheduler", "discover_hosts_in_cells_interval"): "berth maps no hosts to cells",
    (
        "filter_scheduler",
        "available_filters",
    ): "berth's own filters are there; others are in scheduler.available_filters",
    ("filter_scheduler", "cross_cell_move_weight_multiplier"): "a server's own cell is searched first",
    ("filter_scheduler", "track_instance_changes"): "placement tells berth where instances are",
    ("filter_scheduler", "aggregate_image_properties_isolation_namespace"): "all metadata of an aggregate counts",
    ("filter_scheduler", "aggregate_image_properties_isolation_separator"): "all metadata of an aggregate counts",
    **{
        ("filter_scheduler", name): _NO_WEIGHER
        for name in ("image_props_weight_multiplier", "image_props_weight_setting")
    },
}


class NovaConfUnreadable(Fault):
    """A file is no nova.conf."""

    code = "nova.conf_unreadable"


class UntranslatedOption(Struct, frozen=True):
    """An option of a nova.conf that is no setting here, and why."""

    group: str
    option: str
    reason: str


class Translation(Struct, frozen=True):
    """The settings of a nova.conf, as a tree that begins with `nova` and `scheduler`, and what is not among them."""

    settings: dict[str, Any]
    left_out: tuple[UntranslatedOption, ...]


def translate(body: bytes) -> Translation:
    """The settings that a nova.conf gives. Raises NovaConfUnreadable."""
    tree: dict[str, Any] = {}
    left_out: list[UntranslatedOption] = []
    weighers: frozenset[str] | None = None  # the only ones, of `weight_classes`
    for name, text in _options(body):
        if DEFAULTS.get(name) == text.strip():
            continue
        if name == WEIGHT_CLASSES:
            weighers = frozenset(_list(text))
            continue
        path = TRANSLATED.get(name)
        reason = UNTRANSLATED.get(name, "berth does not know it")
        if path is not None:
            try:
                _put(tree, path, _value(path, text))
                continue
            except (msgspec.ValidationError, ValueError) as error:
                reason = reason_of(error)
        if path is not None or name[0] in GROUPS:
            left_out.append(UntranslatedOption(name[0][:MAX_SHOWN], name[1][:MAX_SHOWN], reason))
    if weighers is not None:
        left_out += _weigh_by(tree, weighers)
    left_out += _contradictions(tree)
    return Translation(tree, tuple(left_out))


def _weigh_by(tree: dict[str, Any], paths: frozenset[str]) -> Iterator[UntranslatedOption]:
    """Weigh by these alone: the multiplier of another one is 0, which is as good as leaving it out."""
    enabled = {path.rpartition(".")[2] for path in paths if path.startswith(OF_NOVA)}
    for weigher, multiplier in WEIGHERS.items():
        if weigher not in enabled:
            _put(tree, ("scheduler", "multipliers", multiplier), 0.0)
    for path in sorted(paths):
        if not path.startswith(OF_NOVA) or path.rpartition(".")[2] not in WEIGHERS:
            yield UntranslatedOption(*WEIGHT_CLASSES, f"berth has no {path[:MAX_SHOWN]}")


def _options(body: bytes) -> Iterator[tuple[Name, str]]:
    """Each option of a file with its last value. Raises NovaConfUnreadable."""
    # No section of a file passes its options on to the others.
    parser = configparser.RawConfigParser(
        default_section="\0", strict=False, empty_lines_in_values=False, comment_prefixes=("#", ";")
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    if len(body) > MAX_BYTES:
        raise NovaConfUnreadable(f"it has more than {MAX_BYTES} bytes")
    try:
        parser.read_string(body.decode())
    except (configparser.Error, UnicodeDecodeError) as error:
        raise NovaConfUnreadable(reason_of(error).partition("\n")[0]) from None
    for group in parser.sections():
        for option, text in parser.items(group):
            yield (group, option), text


def _value(path: Path, text: str) -> Any:
    """A value as the setting has it. Raises ValidationError, ValueError."""
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2]
    if _REFERS.search(text):
        raise ValueError("it refers to another option ($)")
    kind = _kind(path)
    given: Any = _DOLLAR.sub("$", text).strip()
    found = inspect.type_info(kind)
    if isinstance(found, inspect.VarTupleType):
        given = _list(given)
    elif isinstance(found, inspect.DictType):
        given = _ratios(given)
    elif isinstance(found, inspect.BoolType):
        given = _BOOLEANS.get(given.lower(), given)
    return msgspec.to_builtins(msgspec.convert(given, kind, strict=False))


def _list(text: str) -> list[str]:
    return [part for one in text.split(",") if (part := one.strip())]


def _ratios(text: str) -> dict[str, float]:
    """{name: ratio} of a list of NAME=RATIO; as in Nova one that is named twice has the sum. Raises ValueError."""
    found: dict[str, float] = {}
    for one in _list(text):
        name, _, ratio = one.partition("=")
        found[name] = found.get(name, 0.0) + float(ratio)
    return found


def _kind(path: Path) -> Any:
    """The type of a setting."""
    kind: Any = _ROOTS[path[0]]
    for name in path[1:]:
        kind = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind, include_extras=True)[name]
    return kind


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _contradictions(tree: Mapping[str, Any]) -> Iterator[UntranslatedOption]:
    """What is translated, and does not let a process of berth decide every call."""
    nova = tree.get("nova", {})
    try:
        reason = msgspec.convert(nova.get("rabbit", {}), RabbitOptions).refused()
    except msgspec.ValidationError as error:
        reason = reason_of(error)
    if reason:
        yield UntranslatedOption("oslo_messaging_rabbit", "", reason)
    option = ("filter_scheduler", "enabled_filters")
    config = NovaConfig(enabled_filters=tuple(nova.get("enabled_filters", ())))
    for one in config.enabled_filters:
        if one in NOT_OWNED:
            yield UntranslatedOption(*option, f"berth does not decide what {one[:MAX_SHOWN]} reads")
    for one in (*config.fact_filters, *config.device_filters):
        yield UntranslatedOption(
            *option, f"for {one[:MAX_SHOWN]}, name the cells' databases in nova.api.cell_databases"
        )
    known = SchedulerConfig(enabled_filters=config.own_filters, available_filters=HOST_FACT_FILTERS)
    for one in plugins.lacking(known):
        yield UntranslatedOption(*option, f"berth has no {one[:MAX_SHOWN]}, and decides no call")
