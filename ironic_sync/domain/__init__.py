"""The meaning of Ironic's words, as plain functions over frozen values."""
