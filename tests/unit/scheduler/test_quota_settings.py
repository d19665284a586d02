"""Quota settings that could never be held to are refused when they are read."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_worker.config import SchedulerConfig


@pytest.mark.parametrize("name", ["vcpu", "VCPU ", "", "VCPU\n", "CPU-CORES", "X" * 256])
def test_a_quota_under_a_name_that_no_claim_may_carry_is_refused(name: str) -> None:
    for raw in ({"default_quota": {name: 1}}, {"quotas": {"p": {name: 1}}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(raw, SchedulerConfig)


def test_a_quota_of_more_classes_than_a_claim_may_limit_is_refused() -> None:
    raw = {"default_quota": {f"CUSTOM_{number}": 1 for number in range(65)}}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, SchedulerConfig)


def test_quotas_of_classes_and_instances_are_taken() -> None:
    quota = {"VCPU": 5, "CUSTOM_GOLD": 0, "INSTANCES": 2}
    config = msgspec.convert({"default_quota": {"VCPU": 1}, "quotas": {"p": quota}}, SchedulerConfig)
    assert config.quota_of("p") == quota
    assert config.quota_of("q") == {"VCPU": 1}
