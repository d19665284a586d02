"""A real Ironic with fake hardware: started privately, with agents that call back."""
