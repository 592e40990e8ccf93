"""Texts, tables and charts of the page: what each view says, read from a run."""
