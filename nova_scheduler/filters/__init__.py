"""Filters and weighers of Nova's hosts by their hardware, which only its database tells."""
