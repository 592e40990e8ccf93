"""Worker processes: the pool and client that the runner uses, and in `xla/` and `pytorch/` the programs inside them."""
