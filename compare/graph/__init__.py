"""The fusion graph: what any compiler made of a function, as one kind of graph."""
