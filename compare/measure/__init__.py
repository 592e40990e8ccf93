"""Measurement: the clock, the timing protocol, ceilings of the GPU, timelines."""
