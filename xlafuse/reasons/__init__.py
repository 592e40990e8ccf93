"""XLA's reasons for missed fusions, from its fusion log, and the changes of each compiler pass."""
