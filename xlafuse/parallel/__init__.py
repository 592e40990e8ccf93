"""Programs over the GPUs of one host: exchanges between them, and a function of one GPU's slices on all of them."""
