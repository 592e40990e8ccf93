"""Numbers that several kernels use. A launcher takes their `value`."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# A maximum starts here: from -inf, a row of -inf alone would subtract -inf from -inf.
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, in float32
