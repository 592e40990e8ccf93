"""A run as one HTML file that needs no network and no server. Reads a run's folder alone: no GPU, no framework."""
