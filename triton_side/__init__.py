"""Everything PyTorch, Triton and CUDA. It needs torch and triton, never jax. Import the module that you need."""

import os

__path__ = [os.path.realpath(folder) for folder in __path__]  # in a checkout, a link in xlafuse/ names this folder
