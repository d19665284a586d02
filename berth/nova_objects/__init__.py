"""A Nova cloud's flavors, aggregates, server groups and quotas as objects of berth, and the other way round."""

from __future__ import annotations
