"""The foundation of all other folders: atomic writes, archives, worker messages, the host, text."""
