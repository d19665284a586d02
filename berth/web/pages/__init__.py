"""The pages, each with the part of `/api/v1` that only it needs."""
