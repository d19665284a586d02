"""Upkeep of the records: requests without news, purging, and answers to a cell that recovers."""
