"""Assertions and snapshots of fusion graphs in users' own tests; the hooks are `xlafuse.pytest_plugin`."""
