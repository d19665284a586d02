"""berth's face: the command line, the all-in-one runner, embedded services, load generator and reports."""
