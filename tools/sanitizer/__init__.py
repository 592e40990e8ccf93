"""A run of every hand-written kernel under compute-sanitizer (`run`), and a reader of the tool's log (`log`)."""
