"""Fusion graphs built from each compiler's own output."""
