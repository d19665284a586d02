"""Nova's own classes in a process of its Python beside ours, on the same random cases."""
