"""Work for users: explain their own functions, export a record's dumps."""
