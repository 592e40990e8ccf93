"""XLA dumps: one compile's artifacts, anybody's dump folder, and the changes of each pass."""
