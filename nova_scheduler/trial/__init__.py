"""A trial beside a running Nova: it listens, decides, and changes nothing."""
