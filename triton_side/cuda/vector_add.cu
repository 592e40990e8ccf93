// out = x + y. The canonical memory-bound kernel: one addition per three memory accesses.
#include "include/elementwise.cuh"

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
vector_add(const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ out, long long elements) {
  const auto add = [](const float (&values)[2]) { return values[0] + values[1]; };
  map_tile<THREADS, VECTORS, LANES>(add, elements, out, x, y);
}
