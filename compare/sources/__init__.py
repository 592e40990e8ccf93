"""Sources of fusion graphs: a path or a function becomes graphs, with the ceilings that price them."""
