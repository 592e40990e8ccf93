"""Foundation that every other folder may use: atomic writes, archives, worker messages, the host, text."""
