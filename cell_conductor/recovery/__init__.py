"""A cell whose database was restored finds out what is true before it opens."""
