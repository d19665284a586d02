"""What a compute service decides: plain functions and frozen values."""
