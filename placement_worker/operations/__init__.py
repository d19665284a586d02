"""The operator's tools for all of placement: audit, repair, export and import it, give a host to another cell."""
