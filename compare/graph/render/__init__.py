"""Fusion graphs as text, Graphviz, notebook HTML and Model Explorer JSON."""
