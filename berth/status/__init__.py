"""All that waits for a person, as one list: read from every part at once, ranked by harm."""
