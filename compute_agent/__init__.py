"""The compute service: manages the hosts of a driver. Its drivers: simulated hypervisors, and bare metal by Ironic."""

from __future__ import annotations
