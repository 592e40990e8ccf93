"""What runs inside a worker process: one module a framework, and the reference. Only workers import these."""
