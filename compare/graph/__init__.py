"""The fusion graph: one data model for the output of every compiler, and what is computed from it."""
