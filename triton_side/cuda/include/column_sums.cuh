// Sums over the rows of a matrix of fp32 partial sums, to which each block or cluster added one row.
#pragma once

#include "pack.cuh"

// Writes sums[column] of partial [partials, columns] for the 32 columns of a tile.
// blockDim = (32, WARPS): the threads of a warp read one cache line of partial, and a warp adds every WARPS-th row.
template <int WARPS, typename T>
__device__ void sum_columns(const float* __restrict__ partial, T* __restrict__ sums, int partials, int columns,
                            int tile) {
  const int column = tile * 32 + static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  if (column < columns)
    for (int row = static_cast<int>(threadIdx.y); row < partials; row += WARPS)
      sum += partial[static_cast<long long>(row) * columns + column];

  __shared__ float of_warp[WARPS][32];
  of_warp[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += of_warp[warp][threadIdx.x];
  sums[column] = from_float<T>(sum);
}
