"""A nova.conf as settings: what is translated, what is named as left out, and files that are none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from berth.config.settings import Settings
from nova_scheduler.app import PCI_WEIGHER
from nova_scheduler.nova_conf import (
    MAX_BYTES,
    TRANSLATED,
    UNTRANSLATED,
    WEIGHERS,
    WEIGHT_CLASSES,
    NovaConfUnreadable,
    translate,
)
from scheduler_worker import plugins
from scheduler_worker.config import DEFAULT_WEIGHERS, NOVA_WEIGHERS, SchedulerConfig

LISTS = "[filter_scheduler]\nenabled_filters = ComputeFilter ,\n  ImagePropertiesFilter,\n"

VALUES = ("True", "1", "none", "PLAIN", "power.watts=1")  # of which each option takes one
FILES: tuple[tuple[str, str, dict[str, Any], set[str]], ...] = (
    # name, file, settings, options that are left out
    ("empty", "", {}, set()),
    (
        "addresses",
        "[DEFAULT]\ntransport_url=rabbit://n:p%23$$@r:5672/nova\n[api_database]\nconnection = mysql+pymysql://n@m/nova_api\n",
        {"nova": {
            "transport_url": "rabbit://n:p%23$@r:5672/nova", "api": {"cells_database": "mysql+pymysql://n@m/nova_api"}
        }},
        set(),
    ),
    (
        "quoted, and a dollar in the other way",
        "[DEFAULT]\ntransport_url = \"rabbit://n:p\\$@r/nova\"\ncontrol_exchange = 'nova2'\n",
        {"nova": {"transport_url": "rabbit://n:p$@r/nova", "control_exchange": "nova2"}},
        set(),
    ),
    ("a list of two lines", LISTS, {"nova": {"enabled_filters": ("ComputeFilter", "ImagePropertiesFilter")}}, set()),
    (
        "numbers and the words of oslo.config",
        "[filter_scheduler]\nhost_subset_size: 3\nram_weight_multiplier=-1.5\npci_in_placement = Yes\n"
        "[oslo_messaging_rabbit]\nrabbit_quorum_queue=on\n[workarounds]\ndisable_fallback_pcpu_query=1\n",
        {
            "scheduler": {"host_subset_size": 3, "multipliers": {"ram": -1.5}},
            "nova": {
                "prefilters": {"pci_in_placement": True, "disable_fallback_pcpu_query": True},
                "rabbit": {"rabbit_quorum_queue": True},
            },
        },
        set(),
    ),
    ("the last value", "[scheduler]\nmax_attempts=2\nmax_attempts=4\n", {"scheduler": {"max_attempts": 4}}, set()),
    ("a section of another service", "[libvirt]\nvirt_type = kvm\n[DEFAULT]\nmy_ip = 10.0.0.1\n", {}, set()),
    (
        "what berth lacks",
        "[scheduler]\nworkers=4\n[filter_scheduler]\nimage_props_weight_multiplier=1\nodd=1\n",
        {},
        {"workers", "image_props_weight_multiplier", "odd"},
    ),
    (
        "bounds, isolated hosts and weighers",
        "[filter_scheduler]\nio_ops_weight_multiplier=-2\nbuild_failure_weight_multiplier=0\nmax_io_ops_per_host=0\n"
        "isolated_hosts=h1, h2\nrestrict_isolated_hosts_to_isolated_images=no\n",
        {"scheduler": {
            "multipliers": {"io_ops": -2.0, "build_failure": 0.0}, "max_io_ops_per_host": 0,
            "isolated_hosts": ("h1", "h2"), "restrict_isolated_hosts_to_isolated_images": False,
        }},
        set(),
    ),
    (
        "metrics",
        "[metrics]\nweight_setting = cpu.percent=-1.0, numa.membw.max=2,cpu.percent=-0.5\nrequired=false\n"
        "weight_multiplier=3\nweight_of_unavailable=-7\n",
        {"scheduler": {
            "metrics": {
                "weights": {"cpu.percent": -1.5, "numa.membw.max": 2.0},
                "required": False, "weight_of_unavailable": -7.0,
            },
            "multipliers": {"metrics": 3.0},
        }},
        set(),
    ),
    (
        "all filters and weighers of Nova's",
        "[filter_scheduler]\navailable_filters = nova.scheduler.filters.all_filters\n"
        "weight_classes = nova.scheduler.weights.all_weighers\n",
        {},
        set(),
    ),
    (
        "some weighers, and one that berth does not have",
        "[filter_scheduler]\ncpu_weight_multiplier = 2\nram_weight_multiplier = 3\nweight_classes = "
        "nova.scheduler.weights.ram.RAMWeigher,nova.scheduler.weights.cross_cell.CrossCellWeigher, my.CPUWeigher\n",
        {"scheduler": {"multipliers": {
            **dict.fromkeys(WEIGHERS.values(), 0.0), "ram": 3.0,
        }}},
        {"weight_classes"},
    ),
    ("metrics that are none", "[metrics]\nweight_setting = power.watts, 3\n", {}, {"weight_setting"}),
    (
        "filters that read the cells' databases",
        "[filter_scheduler]\nenabled_filters = ComputeFilter, IoOpsFilter\n",
        {"nova": {"enabled_filters": ("ComputeFilter", "IoOpsFilter")}},
        {"enabled_filters"},
    ),
    (
        "values out of bounds, and one of another option's",
        "[scheduler]\nmax_attempts=30\n[filter_scheduler]\npci_in_placement=perhaps\n[DEFAULT]\nhost=$my_ip\n",
        {},
        {"max_attempts", "pci_in_placement", "host"},
    ),
    (
        "filters that berth does not have",
        "[filter_scheduler]\nenabled_filters = NUMATopologyFilter, IoOpsFilter, AllHostsFilter\n",
        {"nova": {"enabled_filters": ("NUMATopologyFilter", "IoOpsFilter", "AllHostsFilter")}},
        {"enabled_filters"},
    ),
    (
        "a broker that berth does not speak to",
        "[oslo_messaging_rabbit]\nkombu_compression = gzip\n",
        {"nova": {"rabbit": {"kombu_compression": "gzip"}}},
        {""},
    ),
)  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "left_out"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_files(text: str, settings: dict[str, Any], left_out: set[str]) -> None:
    found = translate(text.encode())

    assert found.settings == settings
    assert {one.option for one in found.left_out} == left_out
    assert msgspec.convert(found.settings, Settings)


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b"a = b", b"[scheduler", b"[scheduler]\n = 3\n", b"#" * (MAX_BYTES + 1)], ids=range(5)
)
def test_no_nova_conf(body: bytes) -> None:
    with pytest.raises(NovaConfUnreadable):
        translate(body)


def test_a_weigher_is_named_as_its_multiplier_is() -> None:
    counted = dict.fromkeys(WEIGHERS.values(), 1.0)
    config = SchedulerConfig(enabled_weighers=(*DEFAULT_WEIGHERS, *NOVA_WEIGHERS, PCI_WEIGHER), multipliers=counted)
    names = {type(one.weigher).__name__: one.weigher.name for one in plugins.weighings(config)}
    assert WEIGHERS.items() <= names.items()
    translated = {path[2] for path in TRANSLATED.values() if path[:2] == ("scheduler", "multipliers")}
    assert translated == set(WEIGHERS.values())


def test_each_option_is_translated_or_named() -> None:
    assert WEIGHT_CLASSES not in TRANSLATED.keys() | UNTRANSLATED.keys()
    assert not TRANSLATED.keys() & UNTRANSLATED.keys()
    for name, path in TRANSLATED.items():
        assert any(translate(f"[{name[0]}]\n{name[1]} = {text}\n".encode()).settings for text in VALUES), path
