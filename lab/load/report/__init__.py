"""The reports about a load: figures of one run, two runs compared, as one HTML file."""
