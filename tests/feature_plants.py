"""Is each `yes` of docs/reference/features.md held by its test? `python -m tests.feature_plants [ID ...]` shows it.

Each plant takes a feature away by one edit in a copy of the tree; the test that the page names for that row has to fail
there. A unit test holds that no plant is stale and that each `yes` row has one, or stands in JUDGED: rows whose test
was judged by what it asks, and was not seen to fail (it needs servers, or the feature is in more than one place).
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from msgspec import Struct

from tests.plants import LEFT_OUT, ROOT, Plant, plant

PAGE = ROOT / "docs" / "reference" / "features.md"
STATES = ("yes", "partly", "no")

_FILTERS = "scheduler_worker/filters/"
_WEIGHERS = "scheduler_worker/weighers/"
_RANKING = "scheduler_worker/domain/ranking.py"
_ROUND = "scheduler_worker/domain/decision_round.py"
_FLAVORS = "scheduler_worker/domain/flavors.py"
_PARSER = "scheduler_worker/domain/flavor_parser.py"
_CLAIMS = "placement_worker/domain/claims.py"
_MOVES, _MOVE_STEPS = "cell_conductor/domain/move_rules.py", "cell_conductor/domain/move_steps.py"
_IRONIC = "ironic_sync/domain/rules.py"
_PREFILTERS = "for prefilter in (_tenant_aggregate, _availability_zone, _isolated_aggregates):"
_NO_ZONES = "for prefilter in (_tenant_aggregate, _isolated_aggregates):"
_ASSUMED = "        self._book.assume(attempt.request.instance_uuid, choice.selected.options[0].allocations)"

# {row: (file, what stands there once, what stands there without the feature)}
PLANTS: dict[str, tuple[str, str, str]] = {
    "F-1": (_FILTERS + "service_is_up.py", "passed = enabled & up", "passed = enabled | ~enabled"),
    "F-2": (_FILTERS + "capabilities_match.py", "passed &= mine", "passed &= True"),
    "F-3": (
        _FILTERS + "image_is_supported.py",
        "np.array([verdicts[word] for word in words], dtype=np.bool_)",
        "np.ones(len(words), dtype=np.bool_)",
    ),
    "F-4": (_FILTERS + "group_has_room.py", "view.counted(spec.peers.members) < most", "view.counted({}) < most"),
    "F-5": (_FILTERS + "group_is_here.py", "view.counted(spec.peers.members) > 0", "view.counted({}) == 0"),
    "F-6": (_FILTERS + "aggregate_has_extra_specs.py", "passed &= mine", "passed &= True"),
    "F-7": (_FILTERS + "image_is_isolated.py", "passed &= ~named | met", "passed &= True"),
    "F-8": (
        _FILTERS + "tenant_is_allowed.py",
        "verdict_of(~restricted | allowed",
        "verdict_of(~restricted | restricted",
    ),
    "F-9": (
        _FILTERS + "flavor_is_listed.py",
        "verdict_of(~restricted | allowed",
        "verdict_of(~restricted | restricted",
    ),
    "F-17": (_FILTERS + "is_another_host.py", "~view.among(spec.peers.different_hosts or ())", "~view.among(())"),
    "F-18": (_FILTERS + "is_the_same_host.py", "view.among(spec.peers.same_hosts or ())", "~view.among(())"),
    "F-op": ("scheduler_worker/domain/extra_specs.py", '"=": operator.ge,', '"=": operator.eq,'),
    "F-once": (_ROUND, "self.rankings.get(attempt.spec.key)", "None"),
    "F-order": (
        "scheduler_worker/plugins.py",
        "        if path is None:\n            raise",
        "        if path is None:\n            continue\n        if not path:\n            raise",
    ),
    "F-plug": ("scheduler_worker/plugins.py", "*MORE_FILTERS, *config.available_filters", "*MORE_FILTERS"),
    "F-log": ("scheduler_worker/domain/explain.py", "for step in reversed(funnel):", "for step in funnel[:0]:"),
    "W-0": ("scheduler_worker/domain/weights.py", "np.minimum(smallest, value), smallest)", "value, smallest)"),
    "W-1": (_WEIGHERS + "free_ram.py", 'view.free("MEMORY_MB")', 'view.free("VCPU")'),
    "W-2": (_WEIGHERS + "free_cpu.py", 'view.free("VCPU")', 'view.free("MEMORY_MB")'),
    "W-3": (_WEIGHERS + "free_disk.py", 'view.free("DISK_GB")', 'view.free("MEMORY_MB")'),
    "W-7": (_WEIGHERS + "group_members_here.py", "return view.counted(spec.peers.members)", "return view.counted({})"),
    "W-8": (
        _WEIGHERS + "group_members_elsewhere.py",
        "return view.counted(spec.peers.members)",
        "return view.counted({})",
    ),
    "W-9": (_WEIGHERS + "recent_build_failures.py", "return view.failed_builds", "return 0 * view.failed_builds"),
    "R-1": (_FLAVORS, _PREFILTERS, "for prefilter in (_availability_zone, _isolated_aggregates):"),
    "R-2": (_FLAVORS, _PREFILTERS, _NO_ZONES),
    "R-4": (_PARSER, 'DISABLED_TRAIT = "COMPUTE_STATUS_DISABLED"', 'DISABLED_TRAIT = "CUSTOM_NEVER"'),
    "R-5": (_FLAVORS, _PREFILTERS, "for prefilter in (_tenant_aggregate, _availability_zone):"),
    "N-2": (
        _PARSER,
        "groups=tuple(_group(suffix, words) for suffix, words in sorted(reading.groups.items()))",
        "groups=()",
    ),
    "N-3": (_RANKING, "else len(self.view) + 1):", "else 2):"),
    "N-5": (_RANKING, "self._rng.randrange(len(viable)) if len(viable) > 1 else 0", "0"),
    "N-6": (_RANKING, "rng if shuffle else None", "None"),
    "N-11": (_FLAVORS, "        forced=request.forced,", "        forced=False,"),
    "N-12": (_FLAVORS, "query = replace(query, only_roots=hosts)", "pass"),
    "N-13": ("scheduler_worker/domain/attempt.py", "for host in request.ignore_hosts", "for host in ()"),
    "N-15": ("scheduler_worker/objects.py", "        self._adopt(after, revision)\n", ""),
    "N-14": (_FLAVORS, _PREFILTERS, _NO_ZONES),
    "N-18": (_ROUND, _ASSUMED, "        pass"),
    "N-27": ("compute_sim/domain/hosts.py", "max_unit=vcpus, allocation_ratio=size.cpu_ratio", "max_unit=vcpus"),
    "N-28": ("compute_sim/agent.py", "asyncio.Semaphore(self._limits.per_host)", "asyncio.Semaphore(1_000)"),
    "N-33a": (_WEIGHERS + "preferences.py", "met += view.has_trait(trait)", "met += 0"),
    "C-3": (
        "scheduler_worker/domain/hosts.py",
        "            if not self._is_held(host.uuid, cell, now_s):\n",
        "            if True:\n",
    ),
    "C-6": (_RANKING, "found = self._next(excluded, drawn, 1, cell=cell)", "found = self._next(excluded, drawn, 1)"),
    "C-7": (_RANKING, "excluded, drawn, alternates)", "excluded, drawn, alternates + 1)"),
    "C-14": ("cell_conductor/domain/rules.py", "    if event.final:\n", "    if event.final and not event.final:\n"),
    "I-2": (_IRONIC, "else CUSTOM + name\n", "else name\n"),
    "I-3": (_IRONIC, "bool(node.maintenance) or node.power", "node.power"),
    "I-4": (_IRONIC, "unavailable(node) or node.instance_uuid is not None", "unavailable(node)"),
    "I-5": (_IRONIC, "provision_state not in STABLE_STATES", 'provision_state == "deploying"'),
    "I-8": (_IRONIC, "tuple(sorted(set(node.traits)))", "()"),
    "I-6": (
        "ironic_sync/domain/position.py",
        "    if not away or position.report is None:\n        return asked",
        "    if asked:\n        return asked",
    ),
    "I-14": ("scheduler_worker/config.py", '"resources:MEMORY_MB": "0", ', ""),
    "I-19": ("compute_sim/drivers/ironic/request.py", '{"project_id": spec.project_id}', "{}"),
    "I-15": (_RANKING, "rng if shuffle else None", "None"),
    "D-13": (
        _PARSER,
        "for resource_class, amount in words.resources.items() if amount}",
        "for resource_class, amount in words.resources.items()}",
    ),
    "D-14": (
        _PARSER,
        "groups=tuple(_group(suffix, words) for suffix, words in sorted(reading.groups.items()))",
        "groups=()",
    ),
    "O-5": (_CLAIMS, "if uuid in shapes and shapes[uuid] != provider.shape:", "if uuid in shapes:"),
    "G-1": ("scheduler_worker/plugins.py", "*MORE_FILTERS, *config.available_filters", "*MORE_FILTERS"),
    "G-3": ("scheduler_worker/domain/explain.py", "for step in reversed(funnel):", "for step in funnel[:0]:"),
    "G-5": (_ROUND, _ASSUMED, "        pass"),
    "G-6": (_CLAIMS, "        self.changed_consumers[uuid] = consumer\n", "        pass\n"),
    "G-9": ("scheduler_worker/domain/spread.py", "round(self.lost * most)", "0"),
    "C-22": (
        _MOVE_STEPS,
        "here_gone = instance.state not in COMMANDED and not is_at_source(instance)",
        "here_gone = True",
    ),
    "M-2": (
        _MOVES,
        "return change(told, State.HANDING_OVER, kind, event.at, timeouts)",
        "return finish(told, event.at, timeouts)",
    ),
    "M-3": (_MOVES, "    if event.final:\n", "    if event.attempt:\n"),
    "M-4": (_MOVES, "attempt=move.source_attempt if taken.is_in_place else event.attempt", "attempt=event.attempt"),
    "M-5": (
        _MOVE_STEPS,
        "deadline = None if move.auto_confirm_s is None else at + move.auto_confirm_s",
        "deadline = None",
    ),
    "M-6": (_MOVE_STEPS, "    if not lost.finishing:", "    if lost.finishing:"),
    "M-7": (
        _MOVES,
        'return undo(instance, event.at, timeouts, event.code or "hand-over.failed", event.reason)',
        "return finish(instance, event.at, timeouts)",
    ),
    "M-9": (_MOVES, "    if request.kind is not MoveKind.UNSHELVE:\n", "    if request.kind:\n"),
    "M-11": (_MOVE_STEPS, "return undo(left, at, timeouts, NO_HOST, story_of_hosts(left))", "return Step(left)"),
    "T-13": (
        _MOVE_STEPS,
        "    if instance.is_in_place:\n        return Step(rules.ask",
        "    if True:\n        return Step(rules.ask",
    ),
    "T-1": ("scheduler_worker/domain/weights.py", "(clamped - scale.low) / scale.span", "clamped"),
    "T-2": ("scheduler_worker/domain/weights.py", "np.minimum(smallest, value), smallest)", "value, smallest)"),
    "T-5": (_RANKING, "excluded, drawn, alternates)", "excluded, drawn, alternates + 1)"),
    "T-14": (
        _CLAIMS,
        "            if more <= 0:\n                continue  # over",
        "            if False:\n                continue  # over",
    ),
    "T-15": ("scheduler_worker/domain/extra_specs.py", '"=": operator.ge,', '"=": operator.eq,'),
    "T-16": ("ironic_sync/domain/position.py", "    if overtaken and offers_more(", "    if not node and offers_more("),
    "T-19": (_FLAVORS, "        forced=request.forced,", "        forced=False,"),
}

JUDGED = (
    "N-4", "N-8", "N-9", "N-10", "N-20", "N-21", "N-23", "N-24", "N-rt", "N-upt", "N-25", "N-29", "N-30", "N-31",
    "N-32", "N-34", "C-1", "C-2", "C-4", "C-5", "C-8", "C-9", "C-10", "C-11", "C-12", "C-15", "C-16", "C-17",
    "C-19", "C-23", "M-1", "M-12", "M-13", "I-1", "I-7", "I-9", "I-11", "I-13", "I-16", "D-1", "D-2", "D-5", "D-8",
    "D-10",
    "D-11", "D-12", "D-15", "B-1", "B-2", "B-3", "B-4", "B-5", "B-6", "B-8", "B-9", "B-10", "B-11", "O-4", "O-7",
    "O-11", "G-7", "G-11", "T-3", "T-4", "T-6", "T-7", "T-8", "T-9", "T-10", "T-11", "T-12", "T-20",
)  # fmt: skip


class Row(Struct, frozen=True):
    """One line of the page's tables."""

    id: str
    what: str
    state: str
    lacks: str
    where: tuple[str, ...]


def read(page: str) -> list[Row]:
    """Every row of every table."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"[A-Z]-[0-9a-z]+", cells[0]):
            assert len(cells) == 4, line
            state, _, lacks = cells[2].partition(":")
            found.append(Row(cells[0], cells[1], state, lacks.strip(), tuple(re.findall(r"`([^`]+)`", cells[3]))))
    return found


def main(names: list[str]) -> int:
    """Take away the features of these rows, or of all; 1: a test did not notice."""
    tests = {row.id: row.where[-1] for row in read(PAGE.read_text()) if row.state == "yes"}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="berth-plants-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        for name, (file, old, new) in PLANTS.items():
            if names and name not in names:
                continue
            found = plant(Plant(name=name, does="", file=file, old=old, new=new, tests=tests[name]), copy)
            failed = found.startswith(tests[name])
            missed += not failed
            sys.stdout.write(f"{name}: {'held' if failed else found}\n")
            sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
