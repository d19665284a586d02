"""A process that has imported berth, and forks the `berth` processes that tests want: real ones, which start at once.

Python and its imports take most of a second of processor, in every process anew. A line of JSON on its input starts
for one thing, and is answered by a line. A forked program has the arguments, environment, directory and files that it
would have had, is a session of its own, and ends when this process does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

import cell_conductor.app
import compute_agent.app
import gateway.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.cli.main import main
from tests.kit.preloading import preload

PR_SET_PDEATHSIG = 1
PRELOADED = (
    cell_conductor.app,
    compute_agent.app,
    gateway.app,
    ironic_sync.app,
    placement_worker.app,
    scheduler_worker.app,
)


def serve() -> None:
    """Until standard input ends. Returns in a forked child too, which then is a `berth` process."""
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        requested = json.loads(line)
        if "poll" in requested:
            pid = requested["poll"]
            if pid not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(ended[1])
            answer: dict[str, Any] = {"status": statuses.get(pid)}
        else:
            began, has_begun = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(began)
                become(requested)
                os.close(has_begun)
                return
            os.close(has_begun)
            os.read(began, 1)  # until it has a session of its own, with which it is killed, and its log
            os.close(began)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)


def become(requested: dict[str, Any]) -> None:
    """The process that was asked for, as the kernel and Python would have made it."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(requested["cwd"])
    os.environ.clear()
    os.environ.update(requested["env"])
    for number, (name, flags) in enumerate(
        (
            (requested["stdin"], os.O_RDONLY),
            (requested["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (requested["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        )
    ):
        file = os.open(name, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (they are this process's own)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["berth", *requested["arguments"]]


if __name__ == "__main__":
    preload(workers=True)
    serve()
    main()
