"""Find the fusion graphs of any path: a run, a dump folder, an archive, a file. Ceilings of target GPUs."""
