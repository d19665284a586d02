"""What Ironic's words mean, as plain functions over frozen values."""
