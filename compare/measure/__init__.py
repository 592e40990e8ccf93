"""Measurement: the clock, the timing protocol (warm-up, L2 flush, samples), the GPU's ceilings, timelines."""
