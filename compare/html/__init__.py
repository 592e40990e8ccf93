"""One HTML file a run: the document and its views."""
