"""What is on record: builds, actions, drains, fences, objects, and what they have in common. Pure."""
