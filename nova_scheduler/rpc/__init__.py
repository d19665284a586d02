"""Calls of topic `scheduler`: taken in, dispatched and answered."""
