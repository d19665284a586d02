"""The hosts of a cell: leases of their compute services, fences, hosts that two services list."""
