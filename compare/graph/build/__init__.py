"""Builders: fusion graphs from each compiler's own output."""
