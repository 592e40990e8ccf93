"""Blocks, their cases and their implementations as data; `blocks/` is the table of blocks."""
