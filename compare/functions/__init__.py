"""A user's function: found by its name, told apart by framework, sent to another process, called by shapes."""
