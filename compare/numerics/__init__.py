"""Numerics: input arrays, the float64 reference, errors and tolerances."""
