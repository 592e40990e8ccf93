"""The source texts of a page: HLO, generated code, Triton, CUDA, PTX and SASS, with the lines of each kernel."""
