"""Analyses of fusion graphs: totals, rooflines, alignment, differences, ablations."""
