"""The state of a Nova cloud: read by its REST API, and kept fresh."""
