// LayerNorm over the columns of a matrix, and its gradients.
//
//   forward   y  = n w + b,  n = (x - mean(x)) rstd,  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)    in fp32
//   backward  dx = rstd (g - mean(g) - n mean(g n)),  g = dy w
//             dw = sum over rows of dy n              db = sum over rows of dy
//
// A block takes a row, reads it once and holds it in registers: VECTORS packs of LANES elements in each of THREADS
// threads. Longer rows go to the *_streaming kernels, which read them twice. dw and db are sums over rows without
// atomics: layernorm_backward (for streamed rows layernorm_partials) sums the rows of each block, and
// layernorm_sum_partials sums the blocks.
#include "include/column_sums.cuh"
#include "include/normalise.cuh"

struct Moments {  // of the elements read so far; squares = sum of (element - mean)^2
  float count;
  float mean;
  float squares;
};
__device__ inline Moments shuffle_xor(Moments value, int distance) {
  return {shuffle_xor(value.count, distance), shuffle_xor(value.mean, distance), shuffle_xor(value.squares, distance)};
}
// Chan, Golub and LeVeque, Algorithms for computing the sample variance (The American Statistician 37(3), 1983). The
// error grows with mean / deviation; with sums of x and of x^2 it would grow with the square of that.
__device__ inline Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float apart = b.mean - a.mean;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

template <typename T, int LANES>
__device__ inline Moments moments(const Pack<T, LANES>& pack) {
  const float mean = sum(pack) / LANES;
  return {LANES, mean, sum_of_squares(pack, mean)};
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_forward(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                  float* __restrict__ mean, float* __restrict__ rstd, int columns, float eps) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  Pack<T, LANES> packs[VECTORS];
  load_row<THREADS>(packs, x, threadIdx.x * LANES, columns);
  const Statistics of_row = statistics<THREADS>(packs, columns, eps);
  save(mean, rstd, of_row);
  store_normalized<THREADS>(packs, weight, bias, y, columns, of_row);
}

// One block per row, any number of columns.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_forward_streaming(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                            T* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd,
                            int columns, float eps) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  Moments of_thread = {0.0f, 0.0f, 0.0f};
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    of_thread = merge(of_thread, moments(load<LANES>(x + column)));
  const Moments merged = reduce_row<THREADS, 1>(of_thread);
  const Statistics of_row = {merged.mean, rsqrtf(merged.squares / columns + eps)};

  save(mean, rstd, of_row);
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(y + column, normalized(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(bias + column),
                                 of_row));
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_backward(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ mean,
                   const float* __restrict__ rstd, const T* __restrict__ dy, T* __restrict__ dx,
                   float* __restrict__ partial, int rows, int columns) {
  norm_backward<true, THREADS, LANES, VECTORS>(x, weight, mean, rstd, dy, dx, partial, rows, columns);
}

// One block per row, any number of columns. It computes dx only.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_backward_streaming(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ mean,
                             const float* __restrict__ rstd, const T* __restrict__ dy, T* __restrict__ dx,
                             int columns) {
  x += static_cast<long long>(blockIdx.x) * columns;
  dy += static_cast<long long>(blockIdx.x) * columns;
  dx += static_cast<long long>(blockIdx.x) * columns;
  const Statistics of_row = {mean[blockIdx.x], rstd[blockIdx.x]};

  Sums total = {0.0f, 0.0f};
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    total = merge(total, sums(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column), of_row));
  total = reduce_row<THREADS, 1>(total);
  const Sums means = {total.gradient / columns, total.projection / columns};

  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES) {
    float gradients[LANES];
    gradient(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column), of_row, means, gradients);
    store(dx + column, pack<T>(gradients));
  }
}

template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_partials(const T* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                   const T* __restrict__ dy, float* __restrict__ partial, int partials, int rows, int columns) {
  norm_partials<true, THREADS, LANES>(x, mean, rstd, dy, partial, partials, rows, columns);
}

// Sums partial [2, partials, columns]: the first half of the blocks for dweight, the other half for dbias.
template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
layernorm_sum_partials(const float* __restrict__ partial, T* __restrict__ dweight, T* __restrict__ dbias,
                       int partials, int columns) {
  const int tiles = gridDim.x / 2;
  const bool of_bias = blockIdx.x >= tiles;
  if (of_bias) partial += static_cast<long long>(partials) * columns;
  sum_columns<WARPS>(partial, of_bias ? dbias : dweight, partials, columns, blockIdx.x % tiles);
}
