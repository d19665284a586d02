"""The real Placement with what it has loaded frozen for the garbage collector: a second baseline (uwsgi imports this).

Runs in the real one's virtualenv, so it imports nothing of ours. Frozen when loaded and again after a process's first
requests, which fill its caches.
"""

import gc
import itertools

from placement.wsgi.api import application as real  # type: ignore[import-not-found]

WARM = 3
served = itertools.count(1)


def application(environ, start_response):  # type: ignore[no-untyped-def]
    """WSGI."""
    if next(served) == WARM:
        gc.collect()
        gc.freeze()
    return real(environ, start_response)


gc.collect()
gc.freeze()
