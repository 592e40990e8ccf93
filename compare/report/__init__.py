"""Reports: tables, pages and pictures from a run folder; they need no GPU and no framework."""
