"""The Placement REST API, microversions 1.0 to 1.39. It uses the same records, feed and candidate search as the bus."""
