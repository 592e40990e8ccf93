"""Readers of XLA dumps: the artifacts of one compile, any `--xla_dump_to` folder, and the fusion log."""
