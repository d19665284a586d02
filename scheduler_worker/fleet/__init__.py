"""The fleet around a scheduler: reports of hosts, connections to cells, fences, removal of hosts and services."""
