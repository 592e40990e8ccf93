"""Work on a user's own code: explain a function, export a record's dumps."""
