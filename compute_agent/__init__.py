"""The compute service: takes a conductor's commands, has a driver carry them out, and reports results, hosts and
inventory.
"""

from __future__ import annotations
