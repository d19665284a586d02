"""Builds, changes and deletes instances in one cell; retries alternates without asking a scheduler."""
