"""Runs: a plan becomes records in a run folder."""
