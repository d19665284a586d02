"""How workers keep their state: guarded statements, cached row versions, and the optimistic unit of work."""
