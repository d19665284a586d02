"""Runs many commands of berth and of `scripts/load`, each in a process of its own, and pays for imports only once.

A line of JSON on its input starts for one command; a forked child runs it as the program would be run. The answer is
a line of JSON: the exit status and what was printed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from berth.cli.main import app
from lab.load.command import app as load
from tests.kit.preloading import preload

PROGRAMS = {"berth": app, "scripts/load": load}


def main() -> None:
    """Until standard input ends."""
    preload(workers=False)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()


def run(requested: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(requested["given"].encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            for number, file in enumerate((given, out, err)):
                os.dup2(file.fileno(), number)
            os._exit(command(requested))
        _, ended = os.waitpid(child, 0)
        printed = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return {"status": os.waitstatus_to_exitcode(ended), "out": printed[0], "err": printed[1]}


def command(requested: dict[str, Any]) -> int:
    os.environ.update(requested["settings"])
    os.chdir(requested["directory"])
    sys.stdin = open(0)  # noqa: SIM115  (the child ends with it)
    status = 0
    try:
        PROGRAMS[requested["program"]](requested["arguments"], prog_name=requested["program"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
