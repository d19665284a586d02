"""The Placement REST API 1.0 to 1.39, over the same book, feed and candidate search that the bus uses."""
