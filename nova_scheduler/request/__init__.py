"""A RequestSpec of Nova, parsed, and the candidate query that it becomes."""
