"""Reasons for missed fusions, from XLA's fusion log and its replay."""
