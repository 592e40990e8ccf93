// Softmax over the columns of a matrix, and its gradient.
//
//   forward   y  = exp(x - max(x)) / sum(exp(x - max(x)))        per row, in fp32
//   backward  dx = y (dy - sum(y dy))                            per row, in fp32
//
// A row of only -inf gives zeros in y, and so in dx.
//
// A row is read once and held in registers: VECTORS packs of LANES elements per thread, in THREADS threads of each of
// CLUSTER blocks. THREADS = 32: one warp per row and ROWS rows per block, with shuffles only. CLUSTER > 1: the blocks of
// a thread block cluster share a row and exchange partial results through distributed shared memory.
// Rows that registers cannot hold go to the *_streaming kernels, which read the input twice.
#include <math_constants.h>  // CUDART_INF_F, CUDART_MAX_NORMAL_F

#include "include/pack.cuh"
#include "include/reduce.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

struct Normalizer {  // sum = sum of exp(x - maximum) over the elements read so far
  float maximum;
  float sum;
};

__device__ inline Normalizer shuffle_xor(Normalizer value, int distance) {
  return {shuffle_xor(value.maximum, distance), shuffle_xor(value.sum, distance)};
}

__device__ inline float exponential(float x) { return exp2f(x * LOG2_E); }

// The smallest value of a maximum. With -inf for no elements or for only -inf, exp(-inf - (-inf)) would be NaN.
__device__ inline float lowest() { return -CUDART_MAX_NORMAL_F; }

__device__ inline Normalizer merge(Normalizer a, Normalizer b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  return {maximum, a.sum * exponential(a.maximum - maximum) + b.sum * exponential(b.maximum - maximum)};
}

// The factor of a row's exponentials: 1 / sum, or 0 for a row of only -inf, whose sum is 0.
__device__ inline float scale_of(Normalizer of_row) { return of_row.sum == 0.0f ? 0.0f : 1.0f / of_row.sum; }

// Functions of one pack.
template <typename T, int LANES>
__device__ inline float maximum(const Pack<T, LANES>& pack) {
  float values[LANES];
  unpack(pack, values);
  float result = values[0];
#pragma unroll
  for (int i = 1; i < LANES; ++i) result = fmaxf(result, values[i]);
  return result;
}

template <typename T, int LANES>
__device__ inline float sum_of_exponentials(const Pack<T, LANES>& pack, float maximum) {
  float values[LANES], sum = 0.0f;
  unpack(pack, values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) sum += exponential(values[i] - maximum);
  return sum;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> normalized(const Pack<T, LANES>& x, float maximum, float scale) {
  float values[LANES];
  unpack(x, values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) values[i] = exponential(values[i] - maximum) * scale;
  return pack<T>(values);
}

template <typename T, int LANES>
__device__ inline float dot_product(const Pack<T, LANES>& a, const Pack<T, LANES>& b) {
  float a_values[LANES], b_values[LANES], sum = 0.0f;
  unpack(a, a_values);
  unpack(b, b_values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) sum += a_values[i] * b_values[i];
  return sum;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> gradient(const Pack<T, LANES>& y, const Pack<T, LANES>& dy, float dot) {
  float y_values[LANES], dy_values[LANES];
  unpack(y, y_values);
  unpack(dy, dy_values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) dy_values[i] = y_values[i] * (dy_values[i] - dot);
  return pack<T>(dy_values);
}

// The row of this thread, and the column of its first pack; pack v starts at column + v * THREADS * LANES.
struct Position {
  long long row;
  int column;
};

template <int LANES, int VECTORS, int THREADS, int CLUSTER>
__device__ inline Position position_in_matrix() {
  if constexpr (THREADS == 32) {
    return {static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y, static_cast<int>(threadIdx.x) * LANES};
  } else {
    const int rank = blockIdx.x % CLUSTER;
    return {blockIdx.x / CLUSTER, (rank * VECTORS * THREADS + static_cast<int>(threadIdx.x)) * LANES};
  }
}

template <typename T, int LANES, int VECTORS, int THREADS, int CLUSTER>
__device__ void forward_in_registers(const T* x, T* y, long long rows, int columns) {
  const Position here = position_in_matrix<LANES, VECTORS, THREADS, CLUSTER>();
  if (here.row >= rows) return;  // a whole warp returns, and only where each warp has its own row
  x += here.row * columns;
  y += here.row * columns;

  Pack<T, LANES> packs[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = here.column + v * THREADS * LANES;
    packs[v] = column < columns ? load<LANES>(x + column) : filled<T, LANES>(-CUDART_INF_F);
  }

  Normalizer of_thread = {lowest(), 0.0f};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) of_thread.maximum = fmaxf(of_thread.maximum, maximum(packs[v]));
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) of_thread.sum += sum_of_exponentials(packs[v], of_thread.maximum);
  const Normalizer of_row = reduce_row<THREADS, CLUSTER>(of_thread);

  const float scale = scale_of(of_row);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = here.column + v * THREADS * LANES;
    if (column < columns) store(y + column, normalized(packs[v], of_row.maximum, scale));
  }
}

template <typename T, int LANES, int VECTORS, int THREADS, int CLUSTER>
__device__ void backward_in_registers(const T* y, const T* dy, T* dx, long long rows, int columns) {
  const Position here = position_in_matrix<LANES, VECTORS, THREADS, CLUSTER>();
  if (here.row >= rows) return;
  y += here.row * columns;
  dy += here.row * columns;
  dx += here.row * columns;

  Pack<T, LANES> y_packs[VECTORS], dy_packs[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = here.column + v * THREADS * LANES;
    y_packs[v] = column < columns ? load<LANES>(y + column) : filled<T, LANES>(0.0f);
    dy_packs[v] = column < columns ? load<LANES>(dy + column) : filled<T, LANES>(0.0f);
  }

  float dot = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) dot += dot_product(y_packs[v], dy_packs[v]);
  dot = reduce_row<THREADS, CLUSTER>(dot);

#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = here.column + v * THREADS * LANES;
    if (column < columns) store(dx + column, gradient(y_packs[v], dy_packs[v], dot));
  }
}

// blockDim = (THREADS, ROWS). ROWS > 1 only with THREADS = 32.
template <typename T, int LANES, int VECTORS, int THREADS, int ROWS>
__global__ void __launch_bounds__(THREADS * ROWS)
softmax_forward(const T* __restrict__ x, T* __restrict__ y, long long rows, int columns) {
  forward_in_registers<T, LANES, VECTORS, THREADS, 1>(x, y, rows, columns);
}

template <typename T, int LANES, int VECTORS, int THREADS, int ROWS>
__global__ void __launch_bounds__(THREADS * ROWS)
softmax_backward(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx, long long rows, int columns) {
  backward_in_registers<T, LANES, VECTORS, THREADS, 1>(y, dy, dx, rows, columns);
}

#if __CUDA_ARCH__ >= 900
template <typename T, int LANES, int VECTORS, int THREADS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS)
softmax_forward_cluster(const T* __restrict__ x, T* __restrict__ y, long long rows, int columns) {
  forward_in_registers<T, LANES, VECTORS, THREADS, CLUSTER>(x, y, rows, columns);
}

template <typename T, int LANES, int VECTORS, int THREADS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS)
softmax_backward_cluster(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx,
                         long long rows, int columns) {
  backward_in_registers<T, LANES, VECTORS, THREADS, CLUSTER>(y, dy, dx, rows, columns);
}
#endif

// One block per row, any number of columns. The running sum is rescaled whenever a larger value appears.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_forward_streaming(const T* __restrict__ x, T* __restrict__ y, long long rows, int columns) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  Normalizer of_thread = {lowest(), 0.0f};
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES) {
    const Pack<T, LANES> pack = load<LANES>(x + column);
    const float largest = fmaxf(maximum(pack), lowest());
    of_thread = merge(of_thread, {largest, sum_of_exponentials(pack, largest)});
  }
  const Normalizer of_row = reduce_row<THREADS, 1>(of_thread);

  const float scale = scale_of(of_row);
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(y + column, normalized(load<LANES>(x + column), of_row.maximum, scale));
}

template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
softmax_backward_streaming(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx,
                           long long rows, int columns) {
  y += static_cast<long long>(blockIdx.x) * columns;
  dy += static_cast<long long>(blockIdx.x) * columns;
  dx += static_cast<long long>(blockIdx.x) * columns;

  float dot = 0.0f;
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    dot += dot_product(load<LANES>(y + column), load<LANES>(dy + column));
  dot = reduce_row<THREADS, 1>(dot);

  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(dx + column, gradient(load<LANES>(y + column), load<LANES>(dy + column), dot));
}
