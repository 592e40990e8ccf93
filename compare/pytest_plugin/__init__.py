"""Assertions and snapshots of fusion graphs in users' own tests; pytest loads plugin.py."""
