"""Parts that the kernels of several operations use: launches, tiles, products, sums over rows, attention tiles."""
