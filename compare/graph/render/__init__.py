"""Views of fusion graphs: terminal text, Graphviz, notebook HTML and Model Explorer JSON."""
