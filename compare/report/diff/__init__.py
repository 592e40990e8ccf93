"""The comparison of two runs: differences of machines and packages, and the changes of each record."""
