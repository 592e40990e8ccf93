"""Twenty forced missed fusions: the price that the report gives to each, and the time that fusing really saves."""
