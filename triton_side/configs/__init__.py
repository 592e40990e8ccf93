"""Launch configurations that GPUs measured: one JSON file a GPU, and their lookup. `xlafuse tune` writes the files."""
