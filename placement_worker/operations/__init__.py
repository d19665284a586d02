"""The operator's tools for a whole book: audit, repair, export and import it, give a host to another cell."""
