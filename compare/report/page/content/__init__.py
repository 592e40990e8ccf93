"""Texts, tables and charts of the page, made from a run."""
