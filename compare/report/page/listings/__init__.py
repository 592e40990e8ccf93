"""Source listings in a page: HLO, Triton, PTX and SASS beside their kernels."""
