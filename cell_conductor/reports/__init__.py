"""What hosts report, compared with the records: breaker, quarantine, reservations."""
