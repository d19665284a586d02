"""The Placement REST API, microversions 1.0 to 1.39. It uses the same book, feed and candidate search as the bus."""
