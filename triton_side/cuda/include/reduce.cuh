// Reduction over the threads that share a row of a matrix: sums, or any other type that has a `merge`.
#pragma once

constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ inline float shuffle_xor(float value, int distance) { return __shfl_xor_sync(FULL_WARP, value, distance); }
__device__ inline float merge(float a, float b) { return a + b; }

// cooperative_groups::this_cluster() uses these intrinsics; its header would need CCCL's headers as well.
#if __CUDA_ARCH__ >= 900  // Hopper and newer have thread block clusters
__device__ inline void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
template <typename Value>
__device__ inline Value in_block(const Value& shared, unsigned rank) {
  return *static_cast<const Value*>(__cluster_map_shared_rank(&shared, rank));
}
#endif

// Merges one value per thread over the THREADS * CLUSTER threads of a row; every thread gets the result. A Value other
// than float needs its own merge and shuffle_xor. A kernel that reduces twice needs another SLOT (other shared memory)
// or a barrier in between; otherwise a fast warp overwrites what a slow one has yet to read.
template <int THREADS, int CLUSTER, int SLOT = 0, typename Value>
__device__ Value reduce_row(Value value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = merge(value, shuffle_xor(value, distance));

  if constexpr (THREADS > 32) {
    constexpr int WARPS = THREADS / 32;
    __shared__ Value of_warp[WARPS];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) value = merge(value, shuffle_xor(value, distance));
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER > 1) {
    __shared__ Value of_block;
    if (threadIdx.x == 0) of_block = value;
    cluster_sync();
    value = in_block(of_block, 0);
#pragma unroll
    for (int rank = 1; rank < CLUSTER; ++rank) value = merge(value, in_block(of_block, rank));
    cluster_sync();  // a block that ends frees its shared memory, which the others still read
  }
#endif
  return value;
}
