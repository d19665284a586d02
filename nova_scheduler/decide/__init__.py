"""The decision about a call: hosts chosen and claimed, the answer, notifications, the log."""
