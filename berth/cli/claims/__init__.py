"""Commands about claims: check, audit, placement, quarantine, recovery."""
