"""Parts of a user's model, and the suite's blocks recognised in it."""
