"""The meaning of Ironic's notifications and node states, as plain functions over frozen values."""
