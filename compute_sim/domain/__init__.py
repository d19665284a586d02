"""The decisions of a compute service: plain functions and frozen values."""
