"""How the fp8 products keep the sum of some terms while the tensor cores sum others.

Hopper's tensor cores sum fp8 products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so a kernel
ends a sum after some terms and starts another. A thread has registers for one sum in float32 and for one in 16 bits.

bfloat16 would err as much as storing c, once for each sum. float16 has three more bits and a smaller range, so a factor
brings the largest possible sum of e4m3 numbers into it. For 8192 terms the factor is 2^-15: sums of 2 and more are
rounded to 11 bits, smaller ones to a multiple of 2^-9. Operands of standard deviation 8 give sums of 5800.

Predicted largest error / rms of c for 8192 terms. The model truncates each sum of the tensor cores in proportion to its
length, which is fitted to the 0.042 measured with one sum, and 16 million numbers are normally distributed:

    | sums                       1      2      4      8
    | kept in float32        0.042  0.028  0.022  0.018   (measured with 2: 0.028)
    | kept in bfloat16              0.035  0.038  0.045
    | kept in float16               0.031  0.023  0.022
"""

import math

LARGEST = 448  # of e4m3
LARGEST_KEPT = 60000  # below float16's largest, 65504, by more than the roundings of a sum can add


def kept_factor(terms: int) -> float:
    """Return the largest power of two by which no sum of so many products overflows float16."""
    return 2.0 ** -math.ceil(math.log2(LARGEST**2 * max(1, terms) / LARGEST_KEPT))
