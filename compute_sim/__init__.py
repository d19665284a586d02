"""compute_sim."""
