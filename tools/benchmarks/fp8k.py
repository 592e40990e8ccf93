import triton, triton.language as tl
from triton_side.kernels.shared.matmul_tiles import *
from triton_side.kernels.shared.tiles import *

@triton.jit
def promote(c, x, y, FAST: tl.constexpr):
    if FAST:
        return tl.dot(x, y, c)
    else:
        return tl.fma(tl.dot(x, y), 1.0, c)

@triton.jit
def fp8_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HALVES: tl.constexpr, FAST: tl.constexpr, FLATTEN: tl.constexpr,
):
    a = open_operand(a_ptr, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, True, False)
    b = open_operand(b_ptr, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, True, True)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, HALVES * BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(tile, m, n, BLOCK_M, HALVES * BLOCK_N, GROUP_M)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if HALVES == 2:
            right = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            at = step * BLOCK_K
            x = load_operand(a, row, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, True, False)
            y = load_operand(b, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, True, True)
            if HALVES == 2:
                z = load_operand(b, at, column + BLOCK_N, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, True, True)
            c = promote(c, x, y, FAST)
            if HALVES == 2:
                right = promote(right, x, z, FAST)
        scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        store_tile(c_ptr, c * scale, row, column, m, n, BLOCK_M, BLOCK_N)
        if HALVES == 2:
            store_tile(c_ptr, right * scale, row, column + BLOCK_N, m, n, BLOCK_M, BLOCK_N)
