// Sums over the rows of a matrix of fp32 partial sums: one row of them from each block that shared out the work.
#pragma once

// The sum of a column of partial [partials, columns], to the threads of the first warp; all of the block must call.
// blockDim = (32, WARPS): neighbouring threads have neighbouring columns, a cache line of partial, and each warp adds up
// every WARPS-th row.
template <int WARPS>
__device__ float sum_rows(const float* __restrict__ partial, int partials, int columns, int column) {
  float sum = 0.0f;
  if (column < columns)
    for (int row = static_cast<int>(threadIdx.y); row < partials; row += WARPS)
      sum += partial[static_cast<long long>(row) * columns + column];

  __shared__ float of_warp[WARPS][32];
  of_warp[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0) return sum;
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += of_warp[warp][threadIdx.x];
  return sum;
}
