"""Answers to queries of clients: from the records, and from this scheduler's memory."""
