"""Random requests to the real Placement and to a live berth, side by side; see scripts/differential.

Run by the conformance suite's own interpreter, not by berth's: it imports nothing of berth's. A story is some hundred
requests that start from an empty book; the two answers to each, and the two books at the end, must be equal. A
sequence that differs is made as short as it goes and written down, so that `--replay` sends it again.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import known
from calls import Call, call_of
from compare import data_of, differences, part_of, without_order, wording
from generator import Generator
from servers import Server, berth, real_placement

SEQUENCE_CALLS = 250
MAX_SHORTENED = 5
MAX_SHORTENING_RUNS = 80


def notify(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Pair:
    """The two servers, one request at a time."""

    def __init__(self, real: Server, ours: Server) -> None:
        self.real = real
        self.ours = ours
        self.excused: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int] = collections.Counter()
        self.wordings: dict[str, dict[str, Any]] = {}
        self.worded_alike = 0
        self.parted = False  # one has written what the other has refused, on purpose: the placements now differ

    def send(self, call: Call) -> tuple[int, Any, list[str]]:
        """The real one's status and data, and what differs in berth's."""
        body = self.real.resolve(call.body)
        real, ours = self.real.send(call, body), self.ours.send(call, body)
        self.statuses[real.status_code] += 1
        if call.method in {"PUT", "POST"}:
            self.real.delete_empty_consumers()
        limit = _limit(call)
        if limit is not None and real.status_code == ours.status_code == 200:
            found = self._limited(call, limit, data_of(ours))
        else:
            found = differences(call, real, ours)
        asked, right = call, real
        if found and known.adds_up_twice(call):
            found, asked, right = self._queried_otherwise(call, real, ours)
            self.excused[known.ADDS_UP_TWICE] += not found
        if found:
            whole = right if limit is None else self.real.send(_without_limit(asked))
            reason = known.reason(call, body, whole, ours)
            if reason is not None:
                self.excused[reason] += 1
                found = []
                self.parted = self.parted or (call.method != "GET" and real.is_success != ours.is_success)
        elif real.status_code >= 400:
            self._compare_wording(call, wording(real), wording(ours))
        return real.status_code, data_of(real), found

    def _queried_otherwise(
        self, call: Call, real: httpx.Response, ours: httpx.Response
    ) -> tuple[list[str], Call, httpx.Response]:
        """An equivalent question that the real one answers right, if there is one: the difference from its answer, the
        question, and the answer.
        """
        same = known.same_question(call)
        if same is None:
            return [], call, real
        right, limit = self.real.send(same), _limit(call)
        if limit is not None and right.status_code == ours.status_code == 200:
            return self._limited(same, limit, data_of(ours)), same, right
        return differences(call, right, ours), same, right

    def _limited(self, call: Call, limit: int, part: Any) -> list[str]:
        """Which of many candidates are taken is each server's own choice."""
        whole = self.real.send(_without_limit(call))
        return part_of(part, data_of(whole), limit) if call.minor >= 12 else []

    def _compare_wording(self, call: Call, real: str, ours: str) -> None:
        if sorted(real.split()) == sorted(ours.split()):
            self.worded_alike += 1
        elif len(self.wordings) < 1000:
            key = f"{call.method} {call.path.split('/')[1].split('?')[0]} {real[:60]}"
            self.wordings.setdefault(key, {"call": call.to_json(), "real": real[:600], "berth": ours[:600]})

    def books(self) -> list[str]:
        """The differences between the two states."""
        real, ours = without_order(self.real.state()), without_order(self.ours.state())
        return [
            f"book: {kind} {key}: {json.dumps(real[kind].get(key))} / {json.dumps(ours[kind].get(key))}"
            for kind in ("providers", "consumers")
            for key in sorted({*real[kind], *ours[kind]})
            if real[kind].get(key) != ours[kind].get(key)
        ]

    def wipe(self) -> None:
        """Two empty placements."""
        self.real.wipe()
        self.ours.wipe()
        self.parted = False


def _without_limit(call: Call) -> Call:
    path, _, query = call.path.partition("?")
    kept = [pair for pair in query.split("&") if not pair.startswith("limit=")]
    return Call(call.method, f"{path}?{'&'.join(kept)}", call.version, headers=call.headers)


def _limit(call: Call) -> int | None:
    parts = urlsplit(call.path)
    given = parse_qs(parts.query).get("limit") if parts.path == "/allocation_candidates" else None
    return int(given[0]) if given and given[0].isdigit() and call.method == "GET" else None


def play(pair: Pair, calls: list[Call], *, always_compare: bool = True) -> list[str]:
    """A story that is known, from an empty book: the first thing that differs."""
    pair.wipe()
    for number, call in enumerate(calls):
        found = pair.send(call)[2]
        if found:
            return [f"request {number}: {call.method} {call.path} {call.version}", *found]
        if pair.parted:
            return []
    return pair.books() if always_compare else []


def invent(pair: Pair, seed: int, length: int) -> tuple[list[Call], list[str]]:
    """A new story: its requests up to the first that differs, and what differs."""
    pair.wipe()
    generator = Generator(random.Random(seed))
    calls: list[Call] = []
    for _ in range(length):
        call = generator.next()
        calls.append(call)
        status, answer, found = pair.send(call)
        generator.note(call, status, answer)
        if found:
            return calls, [f"{call.method} {call.path} {call.version}", *found]
        if pair.parted:
            return calls, []
    return calls, pair.books()


def shorten(pair: Pair, calls: list[Call]) -> list[Call]:
    """Leave out what does not matter (delta debugging), within a bounded number of tries."""
    runs, size = 0, max(1, len(calls) // 2)
    while size >= 1 and runs < MAX_SHORTENING_RUNS:
        start, dropped = 0, False
        while start < len(calls) and runs < MAX_SHORTENING_RUNS:
            # The last request is the one that differs.
            shorter = calls[:start] + calls[min(start + size, len(calls) - 1) :]
            runs += 1
            if len(shorter) < len(calls) and play(pair, shorter):
                calls, dropped = shorter, True
            else:
                start += size
        if not dropped or size > 1:
            size //= 2
    return calls


def run(pair: Pair, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Stories until there have been enough requests; those that differ."""
    failures: list[dict[str, Any]] = []
    if options.replay:
        calls = [call_of(json.loads(line)) for line in options.replay.read_text().splitlines()]
        found = play(pair, calls)
        return [{"differences": found, "calls": [call.to_json() for call in calls]}] if found else []
    sent, sequence = 0, 0
    while sent < options.requests and len(failures) < options.most:
        seed = options.seed * 1_000_003 + sequence
        calls, found = invent(pair, seed, min(SEQUENCE_CALLS, options.requests - sent))
        sequence, sent = sequence + 1, sent + len(calls)
        if not found:
            continue
        notify(f"story {seed}: " + "\n    ".join(found[:4]))
        if len(failures) < MAX_SHORTENED and not options.fast:
            calls = shorten(pair, calls)
            found = play(pair, calls) or ["not again"]
        for call in calls if len(calls) < 25 else ():
            notify("        " + json.dumps(call.to_json()))
        failures.append({"seed": seed, "differences": found, "calls": [call.to_json() for call in calls]})
    return failures


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3000, help="how many at least")
    parser.add_argument("--most", type=int, default=10, help="stop after so many stories that differ")
    parser.add_argument("--fast", action="store_true", help="do not shorten stories")
    parser.add_argument("--json", type=Path, help="write counts, failures and differences of wording there")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send this sequence again: one request a line")
    options = parser.parse_args()
    began = time.monotonic()
    with real_placement() as real, berth(options.berth) as ours:
        pair = Pair(real, ours)
        failures = run(pair, options)
    report = {
        "seed": options.seed,
        "requests": pair.statuses.total(),
        "statuses": dict(sorted(pair.statuses.items())),
        "seconds": round(time.monotonic() - began, 1),
        "failed": len(failures),
        "known_differences": dict(pair.excused),
        "errors_worded_alike": pair.worded_alike,
        "failures": failures,
        "wordings": list(pair.wordings.values()),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    short = ("seed", "requests", "seconds", "failed", "statuses", "known_differences", "errors_worded_alike")
    notify(json.dumps({key: report[key] for key in short}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
