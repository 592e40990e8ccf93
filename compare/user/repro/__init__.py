"""Programs that `xlafuse extract` fills in and writes: one for a kernel of XLA, one for a kernel of Inductor."""
