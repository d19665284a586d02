"""Reports the state of Ironic's nodes as inventory, as soon as it changes."""
