"""What is counted and timed of builds: requests, rounds, claims, decisions, ends."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Sequence

from bus.contracts.build import BuildEvent
from bus.contracts.placement import ClaimResult
from bus.contracts.stages import StageTimes
from bus.faults import Fault
from bus.service.stages import STAGE_S as BUILD_STAGE_S
from scheduler_worker.build.claim_answer import LOST
from scheduler_worker.build.pending_build import Admission, Answered, Continue
from scheduler_worker.metrics import BUILDS, CANDIDATES, CLAIMS, DECISIONS, RETRIES, count_requests
from scheduler_worker.records.build_record import RecordedBuild


def count_builds(admissions: Iterable[Admission]) -> None:
    """Count build requests by what their records lead to; one that is carried on by a redelivery is not counted."""
    labels = Counts(
        one.label if isinstance(one, Answered) else "accepted" for one in admissions if not isinstance(one, Continue)
    )
    for label, count in labels.items():
        count_requests("build", label, count)


# Codes come from drivers, too: distinct ones beyond this number are counted as OTHER.
MAX_CODES = 200
OTHER = "other"
_codes: set[str] = set()


def count_ended(builds: Iterable[BuildEvent | RecordedBuild]) -> None:
    """Count those of the recorded states that end their request."""
    for (state, code), count in Counts([(one.state, one.code) for one in builds if one.terminal]).items():
        if code not in _codes and len(_codes) < MAX_CODES:
            _codes.add(code)
        BUILDS.labels(state.value, code if code in _codes else OTHER).inc(count)


def observe_round(chosen: int, candidates: Iterable[int]) -> None:
    """Count one pass of decisions: how many hosts it has chosen, and the candidates of each ranking that it made."""
    if chosen:
        DECISIONS.labels("chosen").inc(chosen)
    for count in candidates:
        CANDIDATES.observe(count)


def count_claims(answers: Iterable[ClaimResult | Fault]) -> None:
    """Count the answers to claims, and those after which a request claims again."""
    for answer, count in Counts([one.outcome if isinstance(one, ClaimResult) else one.code for one in answers]).items():
        CLAIMS.labels(str(answer)).inc(count)
        if answer in LOST:
            RETRIES.labels(str(answer)).inc(count)


def observe_decisions(builds: Sequence[StageTimes]) -> None:
    """Observe the stages that end with the decision."""
    BUILD_STAGE_S.observe("queued", [stage_times.queued - stage_times.requested for stage_times in builds])
    BUILD_STAGE_S.observe("decided", [stage_times.decided - stage_times.queued for stage_times in builds])
    BUILD_STAGE_S.observe(
        "claimed", [stage_times.claimed - stage_times.decided for stage_times in builds if stage_times.claimed]
    )
