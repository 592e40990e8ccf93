"""The comparison: blocks and cases, numbers, runs and reports. Imports a framework only inside a worker process."""
