// c = a b for row-major c [m, n]; a [m, k] and b [k, n] may have any strides. The classical tiled product.
//
// A block of 16 x 16 threads computes a TILE x TILE tile of c. In each step it copies DEPTH terms of the inner axis of a
// and b into shared memory, as fp32. Each thread adds their products to its SIDE x SIDE = (TILE / 16)^2 sums in
// registers: 2 SIDE values read from shared memory serve SIDE^2 multiplications. Elements outside the matrices are
// zeros.
#include "include/pack.cuh"

constexpr int EDGE = 16;    // threads along either axis of the tile
constexpr int GROUP = 4;    // neighbouring sums of a thread along an axis: one 16-byte access to shared memory
constexpr int PADDING = 4;  // between the rows of a tile: keeps them 16-byte aligned and in different banks

template <int TILE, int DEPTH>
using Tile = float[DEPTH][TILE + PADDING];

// tile[d][i] = source[i * stride_i + d * stride_d] for i < extent, d < depth, else zero. Consecutive threads take
// elements that are neighbours in memory: along the inner axis (INNER_FIRST) or along the outer one. Loads therefore
// coalesce for a matrix and for its transpose.
template <bool INNER_FIRST, int TILE, int DEPTH, typename T>
__device__ inline void fill(Tile<TILE, DEPTH>& tile, const T* source, int extent, int depth, long long stride_i,
                            long long stride_d) {
  constexpr int THREADS = EDGE * EDGE;
  constexpr int STEP_D = INNER_FIRST ? 0 : THREADS / TILE;  // from one element of a thread to its next
  constexpr int STEP_I = INNER_FIRST ? THREADS / DEPTH : 0;
  int d = INNER_FIRST ? threadIdx.x % DEPTH : threadIdx.x / TILE;
  int i = INNER_FIRST ? threadIdx.x / DEPTH : threadIdx.x % TILE;
  source += i * stride_i + d * stride_d;
#pragma unroll
  for (int step = 0; step < TILE * DEPTH / THREADS; ++step) {
    tile[d][i] = i < extent && d < depth ? to_float(*source) : 0.0f;
    d += STEP_D;
    i += STEP_I;
    source += STEP_D * stride_d + STEP_I * stride_i;
  }
}

// The place in the tile, along either axis, of sum `index` of thread `thread`. A thread has groups of GROUP sums, and
// neighbouring threads have neighbouring groups, so a warp reads neighbouring 16 bytes of shared memory.
__device__ inline int position(int thread, int index) {
  return index / GROUP * (EDGE * GROUP) + thread * GROUP + index % GROUP;
}

template <int SIDE>
__device__ inline void read(const float* row, int thread, float (&values)[SIDE]) {
#pragma unroll
  for (int group = 0; group < SIDE; group += GROUP)
    *reinterpret_cast<float4*>(values + group) = *reinterpret_cast<const float4*>(row + position(thread, group));
}

// A_INNER_FIRST, B_INNER_FIRST: whether neighbours along the inner axis are neighbours in memory (see `fill`).
template <typename T, bool A_INNER_FIRST, bool B_INNER_FIRST, int TILE, int DEPTH>
__global__ void __launch_bounds__(EDGE * EDGE, 2)
matmul(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, long long m, long long n, long long k,
       long long stride_am, long long stride_ak, long long stride_bk, long long stride_bn) {
  constexpr int SIDE = TILE / EDGE;
  __shared__ __align__(16) Tile<TILE, DEPTH> a_tile;
  __shared__ __align__(16) Tile<TILE, DEPTH> b_tile;

  const long long row_tiles = (m + TILE - 1) / TILE;
  const long long row = blockIdx.x % row_tiles * TILE, column = blockIdx.x / row_tiles * TILE;
  const int x = threadIdx.x % EDGE, y = threadIdx.x / EDGE;
  const int rows = min(m - row, static_cast<long long>(TILE)), columns = min(n - column, static_cast<long long>(TILE));
  a += row * stride_am;
  b += column * stride_bn;

  float sums[SIDE][SIDE] = {};
  for (long long start = 0; start < k; start += DEPTH) {
    const int depth = min(k - start, static_cast<long long>(DEPTH));
    fill<A_INNER_FIRST, TILE, DEPTH>(a_tile, a, rows, depth, stride_am, stride_ak);
    fill<B_INNER_FIRST, TILE, DEPTH>(b_tile, b, columns, depth, stride_bn, stride_bk);
    a += DEPTH * stride_ak;
    b += DEPTH * stride_bk;
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      __align__(16) float of_a[SIDE], of_b[SIDE];
      read(a_tile[d], y, of_a);
      read(b_tile[d], x, of_b);
#pragma unroll
      for (int i = 0; i < SIDE; ++i)
#pragma unroll
        for (int j = 0; j < SIDE; ++j) sums[i][j] += of_a[i] * of_b[j];
    }
    __syncthreads();  // before the next terms overwrite the tiles
  }

  c += row * n + column;
#pragma unroll
  for (int i = 0; i < SIDE; ++i) {
    const int r = position(y, i);
#pragma unroll
    for (int j = 0; j < SIDE; ++j) {
      const int s = position(x, j);
      if (r < rows && s < columns) c[r * n + s] = from_float<T>(sums[i][j]);
    }
  }
}
