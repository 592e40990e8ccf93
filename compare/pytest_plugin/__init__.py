"""The gate for users' own tests: asserts and snapshots on fusion graphs; `compare.pytest_plugin.plugin` hands it to
pytest."""
