"""Work for users: explain their functions, capture their programs, export a record's dumps."""
