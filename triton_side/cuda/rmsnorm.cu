// RMSNorm over the columns of a matrix, and its gradients.
//
//   forward   y  = n w,  n = x rstd,  rstd = 1 / sqrt(mean(x^2) + eps)                       in fp32
//   backward  dx = rstd (g - n mean(g n)),  g = dy w        dw = sum over rows of dy n
//
// A block takes a row, reads it once and holds it in registers: VECTORS packs of LANES elements in each of THREADS
// threads. Longer rows go to the *_streaming kernels, which read them twice. dw is a sum over rows without atomics:
// rmsnorm_backward (for streamed rows rmsnorm_partials) sums the rows of each block, and rmsnorm_sum_partials sums the
// blocks. The functions of layer norm (include/normalise.cuh) serve here with a mean of 0.
#include "include/column_sums.cuh"
#include "include/normalise.cuh"

template <typename T, int LANES>
__device__ inline Pack<T, LANES> scaled(const Pack<T, LANES>& x, const Pack<T, LANES>& weight, float rstd) {
  float values[LANES], weights[LANES];
  unpack(x, values);
  unpack(weight, weights);
#pragma unroll
  for (int i = 0; i < LANES; ++i) values[i] = values[i] * rstd * weights[i];
  return pack<T>(values);
}

// The sum of g n.
template <typename T, int LANES>
__device__ inline float projection(const Pack<T, LANES>& x, const Pack<T, LANES>& weight, const Pack<T, LANES>& dy,
                                   float rstd) {
  return sums(x, weight, dy, {0.0f, rstd}).projection;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> dx_of(const Pack<T, LANES>& x, const Pack<T, LANES>& weight,
                                       const Pack<T, LANES>& dy, float rstd, float mean_projection) {
  float gradients[LANES];
  gradient(x, weight, dy, {0.0f, rstd}, {0.0f, mean_projection}, gradients);
  return pack<T>(gradients);
}

// 64 registers a thread. Without the second bound ptxas takes 40 for four packs, and spills.
template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
rmsnorm_forward(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, float* __restrict__ rstd,
                int columns, float eps) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  Pack<T, LANES> packs[VECTORS];
  load_row<THREADS>(packs, x, threadIdx.x * LANES, columns);
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) squares += sum_of_squares(packs[v], 0.0f);
  const float of_row = rsqrtf(reduce_row<THREADS, 1>(squares) / columns + eps);

  save(rstd, of_row);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * LANES;
    if (column < columns) store(y + column, scaled(packs[v], load<LANES>(weight + column), of_row));
  }
}

// One block per row, any number of columns.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
rmsnorm_forward_streaming(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y,
                          float* __restrict__ rstd, int columns, float eps) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  float squares = 0.0f;
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    squares += sum_of_squares(load<LANES>(x + column), 0.0f);
  const float of_row = rsqrtf(reduce_row<THREADS, 1>(squares) / columns + eps);

  save(rstd, of_row);
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(y + column, scaled(load<LANES>(x + column), load<LANES>(weight + column), of_row));
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
rmsnorm_backward(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ rstd,
                 const T* __restrict__ dy, T* __restrict__ dx, float* __restrict__ partial, int rows, int columns) {
  norm_backward<false, THREADS, LANES, VECTORS>(x, weight, nullptr, rstd, dy, dx, partial, rows, columns);
}

// One block per row, any number of columns. It computes dx only.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
rmsnorm_backward_streaming(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ rstd,
                           const T* __restrict__ dy, T* __restrict__ dx, int columns) {
  x += static_cast<long long>(blockIdx.x) * columns;
  dy += static_cast<long long>(blockIdx.x) * columns;
  dx += static_cast<long long>(blockIdx.x) * columns;
  const float of_row = rstd[blockIdx.x];

  float total = 0.0f;
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    total += projection(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column), of_row);
  const float mean_projection = reduce_row<THREADS, 1>(total) / columns;

  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(dx + column, dx_of(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column), of_row,
                             mean_projection));
}

template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
rmsnorm_partials(const T* __restrict__ x, const float* __restrict__ rstd, const T* __restrict__ dy,
                 float* __restrict__ partial, int partials, int rows, int columns) {
  norm_partials<false, THREADS, LANES>(x, nullptr, rstd, dy, partial, partials, rows, columns);
}

template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
rmsnorm_sum_partials(const float* __restrict__ partial, T* __restrict__ dweight, int partials, int columns) {
  sum_columns<WARPS>(partial, dweight, partials, columns, blockIdx.x);
}
