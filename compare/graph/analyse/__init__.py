"""Analyses of fusion graphs: alignment, totals, rooflines, differences, findings."""
