"""Two runs held against each other: what their machines and packages differ in, and what became of each record."""
