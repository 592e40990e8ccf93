"""Numbers that several kernels use; a launcher reads their `value`."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The lowest finite float32. A running maximum starts here. If it started at -inf, a row of nothing but -inf would
# compute -inf - -inf.
LOWEST = tl.constexpr(-3.4028234663852886e38)
