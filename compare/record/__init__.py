"""Records of a run: their fields, their check, and the folder that holds them."""
