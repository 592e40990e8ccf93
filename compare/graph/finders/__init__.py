"""What `compare.graph.findings` looks for, a kind of finding a file."""
