"""A run as one HTML file without network or server, made from the run's folder without GPU or framework."""
