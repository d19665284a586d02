"""Every reason that the candidate search gives is put in words."""

from __future__ import annotations

from placement_worker.replica.reasons import Reasons
from placement_worker.replica.request import Group, Query, request_of, slots_of
from scheduler_worker.domain.explain import funnel_step, nearest_reasons, phrase

EVERYTHING = request_of(
    Query(
        resources={"VCPU": 1},
        required=(("A",), ("B", "C")),
        forbidden=("D",),
        member_of=(("a",),),
        forbidden_aggregates=("b",),
        root_required=(("E",),),
        root_forbidden=("F",),
        root_member_of=(("c",),),
        root_forbidden_aggregates=("d",),
        groups=(Group(suffix="_NET", resources={"VF": 1}),),
    )
)


def test_each_reason_of_the_search_has_a_phrase() -> None:
    reasons = Reasons(EVERYTHING, slots_of(EVERYTHING))
    named = [one for code, one in enumerate(reasons.named) if code not in {0, reasons.unexplained}]
    phrases = {(one.step, one.reason): phrase(one.step, one.reason) for one in named}
    assert len(phrases) > 20
    assert [which for which, words in phrases.items() if words.startswith("were rejected by")] == []
    assert phrases["traits", "lacks one of B, C"] == "lack one of B, C"
    assert phrases["group NET", "traits not met"] == "have no provider with the traits of group NET"


def test_pins_have_phrases_too() -> None:
    assert phrase("providers", "ignored") == "were ignored as requested"
    assert phrase("providers", "not among those requested") == "are not among the hosts that were requested"


def test_a_reason_of_no_host_is_no_reason() -> None:
    funnel = (funnel_step("VCPU", 3, {"in use": 3}), funnel_step("cell", 0, {"host.other_cell": 0}))
    assert nearest_reasons(funnel, 3) == ["3 have too little VCPU free"]


def test_a_hosts_cell_and_state_have_phrases() -> None:
    steps = {
        "host.other_cell": "cell",
        "cell.disabled": "cell",
        "host.maintenance": "maintenance",
        "host.fenced": "fenced",
    }
    phrases = {reason: phrase(step, reason) for reason, step in steps.items()}
    assert [reason for reason, words in phrases.items() if words.startswith("were rejected by")] == []
