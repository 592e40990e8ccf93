"""HLO text or proto to modules, launches, buffers, bytes, FLOPs and source lines; needs no jax."""
