"""The commands of `berth`, a file each."""
