"""Findings: sentences about what stands out in fusion graphs. Each file makes one kind of finding."""
