"""What cells report of builds and actions, and what they request about records of other cells."""
