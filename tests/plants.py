"""Defects planted where the code decides, and what finds each: `python -m tests.plants [NAME ...]` plants them anew.

Each is an edit of one line or two, made in a copy of the tree; the named tests have to fail there. The text that the
edit replaces has to be in the file exactly once: otherwise the plant is stale, which is reported, and no failure of
berth's. Long, and so not in CI.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".berth", "*.egg-info", "__pycache__", ".*_cache")
LIMIT_S = 300.0


class Plant(Struct, frozen=True, kw_only=True):
    """One defect: what it does, where, and the tests that are to find it."""

    name: str
    does: str
    file: str
    old: str
    new: str
    tests: str


PLANTS = (
    Plant(
        name="doubted_build_begun_unsearched",
        does="a doubted build is begun before any compute service was queried about its machine",
        file="cell_conductor/handlers.py",
        old="doubted = {one.uuid for one in incoming if _is_doubted(one, search)}",
        new="doubted: set[str] = set()",
        tests="tests/unit/conductor/test_search.py",
    ),
    Plant(
        name="doubted_build_begun_without_all_answers",
        does="a doubted build is begun although a service that is up has not answered",
        file="cell_conductor/search.py",
        old="return found if found or not self.missing else None",
        new="return found",
        tests="tests/unit/conductor/test_search.py",
    ),
    Plant(
        name="adopted_beside_another_machine",
        does="a machine in quarantine is given to its instance though another host has one of it",
        file="cell_conductor/domain/adopt_rules.py",
        old="if len(found) > 1:",
        new="if len(found) > 2:",
        tests="tests/unit/conductor/test_decided_adoption.py",
    ),
    Plant(
        name="second_service_has_the_host_too",
        does="the book takes the inventory of a second service for a host that another one has",
        file="placement_worker/domain/report_group.py",
        old="self.results[number] = InventoryResult(outcome=OTHER_SERVICE, owner=has[0])",
        new="has.append(source)",
        tests="tests/sim/test_fences.py::test_it_builds_nothing_while_the_first_is_down_for_a_while",
    ),
    Plant(
        name="refused_report_proves_losses",
        does="what a service reports of a host that it was refused counts as if the host were its own",
        file="cell_conductor/owners.py",
        old="replace(host, running=None) if host.owner is not None else host",
        new="host",
        tests="tests/unit/conductor/test_host_owners.py",
    ),
    Plant(
        name="overtaken_end_of_a_move_dropped",
        does="the end of a move is outdated when what follows it came first",
        file="scheduler_worker/domain/move_events.py",
        old="(event.sequence <= move.sequence and not ends)",
        new="event.sequence <= move.sequence",
        tests="tests/unit/scheduler/test_announced_moves.py",
    ),
    Plant(
        name="overtaken_404_accepted",
        does="a node is taken out on a 404 though an event of it came since",
        file="ironic_sync/domain/position.py",
        old="    if position.notified_seq > seq:\n"
        "        return replace(position, due_at=now, read_seq=seq)\n    gone =",
        new="    gone =",
        tests="tests/unit/ironic",
    ),
    Plant(
        name="failed_machine_left_running",
        does="a failed instance whose machine runs is left alone",
        file="cell_conductor/domain/table.py",
        old="        DeleteRequested: Rule(rules.end_deleted, (State.DELETED,)),\n",
        new="        DeleteRequested: Rule(rules.end_deleted, (State.DELETED,)),\n        HostRuns: IGNORE,\n",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="survived_machine_kept",
        does="a machine that was destroyed and runs again is kept at its service's start",
        file="compute_sim/agent.py",
        old="entry.phase is Phase.DESTROYING or (survived_destroy and entry.phase is not Phase.BUILDING)",
        new="entry.phase is Phase.DESTROYING",
        tests="tests/unit/compute",
    ),
    Plant(
        name="older_attempt_may_claim",
        does="a claim of the attempt that is on record already is taken again",
        file="placement_worker/domain/claims.py",
        old="claim.attempt <= known.attempt",
        new="claim.attempt < known.attempt",
        tests="tests/unit/placement",
    ),
    Plant(
        name="released_fence_one_lower",
        does="a claim that gave everything back leaves no fence against the attempt before it",
        file="placement_worker/domain/claims.py",
        old="_fence(known, claim.attempt - 1)",
        new="_fence(known, claim.attempt - 2)",
        tests="tests/unit/placement tests/contract/test_book_store.py",
    ),
    Plant(
        name="raced_shape_taken",
        does="a claim is taken though the shape that it was chosen for has changed",
        file="placement_worker/domain/claims.py",
        old="if uuid in shapes and shapes[uuid] != provider.shape:",
        new="if uuid in shapes and shapes[uuid] > provider.shape:",
        tests="tests/unit/placement tests/contract/test_book_store.py",
    ),
    Plant(
        name="own_member_counted",
        does="a server group's member that requests again counts itself among the others",
        file="placement_worker/domain/claim_ledger.py",
        old="group.without([claim.consumer, *([] if",
        new="group.without([*([] if",
        tests="tests/unit/placement tests/contract/test_server_groups.py",
    ),
    Plant(
        name="foreign_provider_claimed",
        does="a cell may claim of another cell's providers",
        file="placement_worker/domain/claims.py",
        old=(
            "is None or uuid in ledger.foreign:\n            return _GONE\n"
            "        if not resources:\n            invalid = True\n        if uuid in"
        ),
        new=(
            "is None:\n            return _GONE\n"
            "        if not resources:\n            invalid = True\n        if uuid in"
        ),
        tests="tests/unit/placement tests/contract",
    ),
    Plant(
        name="replica_skips_a_number",
        does="a replica folds a change in whose number is one too high",
        file="placement_worker/replica/book.py",
        old="if change.sequence != self.sequence + 1:",
        new="if change.sequence > self.sequence + 2:",
        tests="tests/unit/replica",
    ),
    Plant(
        name="older_usage_folded",
        does="a replica takes a provider's older usage for the newest",
        file="placement_worker/replica/book.py",
        old="if row is None or self.generation[row] > generation:",
        new="if row is None:",
        tests="tests/unit/replica",
    ),
    Plant(
        name="removed_class_stays",
        does="a class that a provider has no more stays in the replica",
        file="placement_worker/replica/book.py",
        old="            column.kind[row] = 0\n            column.used[row] = 0\n        for name, inventory",
        new="            column.used[row] = 0\n        for name, inventory",
        tests="tests/unit/replica",
    ),
    Plant(
        name="settled_too_early",
        does="a claim's share is dropped one generation before the feed has it",
        file="placement_worker/replica/book.py",
        old="or self.generation[row] >= generations[uuid]",
        new="or self.generation[row] >= generations[uuid] - 1",
        tests="tests/unit/replica",
    ),
    Plant(
        name="ignored_hosts_chosen",
        does="a host that the client does not want is chosen like any other",
        file="scheduler_worker/domain/placement.py",
        old='selector.uuids_of(host)), "host.ignored")',
        new='()), "host.ignored")',
        tests="tests/unit/scheduler",
    ),
    Plant(
        name="one_alternate_too_many",
        does="a request may be tried on one host more than it allows",
        file="scheduler_worker/domain/placement.py",
        old="(request.max_attempts or selector.config.max_attempts) - 1",
        new="(request.max_attempts or selector.config.max_attempts)",
        tests="tests/unit/scheduler",
    ),
    Plant(
        name="group_not_told_who_was_faster",
        does="a member that another one overtook looks at the group as it was",
        file="scheduler_worker/domain/step.py",
        old="spec=state.spec.with_members(answer.members)",
        new="spec=state.spec",
        tests="tests/unit/scheduler",
    ),
    Plant(
        name="lost_within_grace",
        does="a report counts against a young instance of another service at once",
        file="cell_conductor/domain/report.py",
        old="seen_at > record.since + grace_s",
        new="seen_at > record.since",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="hearsay_of_a_loss",
        does="another service than the host's ends an instance by a scan of before it was built",
        file="cell_conductor/domain/proof.py",
        old="return event.service != service and rescan_id(record) not in event.rescans",
        new="return False",
        tests="tests/unit/conductor/test_table_reports.py",
    ),
    Plant(
        name="rescan_of_a_scan_under_way",
        does="a scan names the rescans that were requested while it went on",
        file="compute_sim/reporter.py",
        old="                        rescans=rescans,",
        new="                        rescans=self._changes.rescans,",
        tests="tests/unit/compute/test_reporter.py",
    ),
    Plant(
        name="loss_overtakes_its_end",
        does="a loss that overtakes the end of its request is announced as a second end",
        file="scheduler_worker/domain/builds.py",
        old="return applies and event.state is BuildState.FAILED",
        new="return False and event.state is BuildState.FAILED",
        tests="tests/integration/scheduler/test_scheduler.py",
    ),
    Plant(
        name="newer_attempt_over",
        does="a machine of a newer attempt than its record's counts as over",
        file="cell_conductor/domain/proof.py",
        old="    return attempt <= record.last_attempt",
        new="    return True",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="deleted_tombstone_builds",
        does="a build that comes after its delete is built",
        file="cell_conductor/domain/table.py",
        old="BuildRequested: Rule(delete_rules.refuse_build, (State.DESTROYING, State.RELEASING)),",
        new="BuildRequested: Rule(rules.start_build, (State.BUILDING, State.CLAIMING)),",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="claim_of_an_older_question",
        does="an answer to an older question moves a build on",
        file="cell_conductor/domain/rules.py",
        old="    if event.attempt != instance.next_attempt:\n        return Step(instance)\n    return _spawn(",
        new="    return _spawn(",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="destroy_waits_no_longer",
        does="a destroy that is not confirmed is asked again without ever waiting longer",
        file="cell_conductor/domain/orders.py",
        old="max(context.destroy_retry_s, at - instance.since)",
        new="context.destroy_retry_s",
        tests="tests/unit/conductor",
    ),
    Plant(
        name="fence_not_raised_by_replacing",
        does="an older Spawn that comes late replaces nothing, but is not fenced once the newer one is gone",
        file="compute_sim/domain/attempts.py",
        old="Phase.BUILDING, fence=max(entry.fence, entry.attempt)",
        new="Phase.BUILDING, fence=entry.fence",
        tests="tests/unit/compute",
    ),
    Plant(
        name="host_slots_unbounded",
        does="builds of one host are not bounded",
        file="compute_sim/agent.py",
        old="async with chain.lock, slot, self._slots:",
        new="async with chain.lock, self._slots:",
        tests="tests/unit/compute",
    ),
    Plant(
        name="offer_of_an_overtaken_read",
        does="a read that an event has overtaken gives a node back",
        file="ironic_sync/domain/position.py",
        old="if overtaken and offers_more(placed.report, position.report):",
        new="if overtaken and offers_more(position.report or placed.report, position.report):",
        tests="tests/unit/ironic",
    ),
    Plant(
        name="instance_not_reserved",
        does="a node that is available and has an instance is on offer",
        file="ironic_sync/domain/rules.py",
        old="return unavailable(node) or node.instance_uuid is not None",
        new="return unavailable(node)",
        tests="tests/unit/ironic",
    ),
    Plant(
        name="drained_batch_acknowledged",
        does="what a draining consumer has not begun is acknowledged",
        file="bus/consuming/consumer.py",
        old="            self._lanes.take().delivery.nack(requeue=True)",
        new="            self._lanes.take().delivery.ack()",
        tests="tests/contract/test_consumer.py",
    ),
    Plant(
        name="outbox_row_deleted_at_the_first",
        does="an outbox row is deleted when the first of its messages is confirmed",
        file="bus/persistence/relay.py",
        old="        if not self.pending:\n            self._ended(self)",
        new="        if self.count:\n            self._ended(self)",
        tests="tests/unit/bus tests/integration/test_outbox.py",
    ),
    Plant(
        name="token_of_another_ironic",
        does="every service of OpenStack is shown the token that the first one's Keystone gave",
        file="bus/openstack/rest.py",
        old="        return KeystoneAuth(keystone, clock=clock, timeout_s=timeout_s, verify=verify, setting=setting)",
        new="        made = KeystoneAuth(keystone, clock=clock, timeout_s=timeout_s, verify=verify, setting=setting)\n"
        "        return auth_of.__dict__.setdefault('one', made)",
        tests="tests/integration/ironic/test_rest.py",
    ),
    Plant(
        name="move_without_a_trace",
        does="a move from the command line begins no trace",
        file="berth/client/moves.py",
        old="            with self._spans.publishing([_traced(request)]):",
        new="            with self._spans.publishing([]):",
        tests="tests/system/test_traces.py::test_a_move_from_the_command_line_and_a_request_over_http_begin_a_trace",
    ),
    Plant(
        name="http_request_without_a_trace",
        does="a request over HTTP begins no trace, and drops that of its caller",
        file="berth/web/application.py",
        old="tracer=env.tracer)",
        new="tracer=None)",
        tests="tests/system/test_traces.py::test_a_move_from_the_command_line_and_a_request_over_http_begin_a_trace",
    ),
    Plant(
        name="notification_without_a_trace",
        does="a notification of Ironic's begins no trace",
        file="ironic_sync/sync_state.py",
        old="        self.traces.begin(before.uuid, what, cause)\n",
        new="",
        tests="tests/system/test_traces.py::test_the_calls_of_ironic_are_in_the_trace_and_its_notifications_begin_some",
    ),
    Plant(
        name="update_outside_of_its_trace",
        does="the update of a node leaves the trace of the notification that caused it",
        file="ironic_sync/writer.py",
        old="[self._sync_state.traces.traceparent(uuid) for uuid in batch]",
        new="[]",
        tests="tests/system/test_traces.py::test_the_calls_of_ironic_are_in_the_trace_and_its_notifications_begin_some",
    ),
)


def plant(one: Plant, copy: Path) -> str:
    """Plant it in the copy and run its tests; the first that fails, or why there is none."""
    path = copy / one.file
    text = path.read_text() if path.exists() else ""
    if text.count(one.old) != 1:
        return "stale: what it replaces is not there once"
    path.write_text(text.replace(one.old, one.new))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--no-header",
            *one.tests.split(),
        ]
        output = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=LIMIT_S).stdout
    except subprocess.TimeoutExpired:
        return f"{one.tests} do not end within {LIMIT_S:g} s"
    finally:
        path.write_text(text)
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED ")
    ]
    if not failed and any(line.startswith("ERROR ") for line in output.splitlines()):
        return "stale: its tests cannot be collected"
    return failed[0] if failed else f"found by nothing in {one.tests}"


def main(names: list[str]) -> int:
    """Plant those of these names, or all. 1: some were found by nothing."""
    sys.stdout.write("| defect | what it does | where | found by |\n| --- | --- | --- | --- |\n")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="berth-plants-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        for one in PLANTS:
            if names and one.name not in names:
                continue
            found = plant(one, copy)
            missed += found.startswith("found by nothing")
            sys.stdout.write(f"| {one.name} | {one.does} | `{one.file}` | {found} |\n")
            sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
