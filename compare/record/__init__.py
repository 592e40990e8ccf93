"""Records of a run: their fields, and the folder that holds them."""
