"""The instance state machine: plain functions and frozen values."""
