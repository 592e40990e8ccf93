"""Findings: what stands out in fusion graphs, a kind of finding a file."""
