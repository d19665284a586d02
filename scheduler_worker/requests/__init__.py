"""What builds, deletes and actions have in common as requests: their delivery and their refusal. Pure."""
