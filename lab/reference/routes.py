"""docs/reference/placement-routes.md: the routes of Placement's REST API that berth serves, read from the router."""

from __future__ import annotations

from placement_worker.rest.routes import ROUTES

HEAD = """\
# Placement's REST routes

Derived from `placement_worker/rest/routes.py` by `scripts/nightly docs`; do not edit by hand.
[The Placement API](placement-api.md) describes who may call them. `since`: the first microversion that has the route.
`policy`: the rule of Placement's own policy file that decides.

| method | path | since | policy |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(f"| {r.method} | `{r.path}` | 1.{r.since} | `{r.rule}` |\n" for r in ROUTES)
