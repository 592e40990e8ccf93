// LayerNorm over the columns of a matrix, and its gradients.
//
//   forward   y  = n w + b,  n = (x - mean(x)) rstd,  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)    in fp32
//   backward  dx = rstd (g - mean(g) - n mean(g n)),  g = dy w
//             dw = sum over rows of dy n              db = sum over rows of dy
//
// A block takes a row, reads it once and holds it in registers: VECTORS packs of LANES elements in each of THREADS
// threads. Rows longer than that go to the *_streaming kernels, which read it twice. dw and db are sums over rows without
// atomics: layernorm_backward adds up those of its block's rows (layernorm_partials where that one streams), and
// layernorm_sum_partials the blocks'.
#include "column_sums.cuh"
#include "pack.cuh"
#include "reduce.cuh"

struct Moments {  // of the elements seen so far; squares = sum of (element - mean)^2
  float count;
  float mean;
  float squares;
};
__device__ inline Moments shuffle_xor(Moments value, int distance) {
  return {shuffle_xor(value.count, distance), shuffle_xor(value.mean, distance), shuffle_xor(value.squares, distance)};
}
// Chan, Golub and LeVeque, Algorithms for computing the sample variance (The American Statistician 37(3), 1983): the
// error grows with mean / deviation, where that of sums of x and of x^2 grows with its square.
__device__ inline Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float apart = b.mean - a.mean;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

struct Sums {  // of g and of g n
  float gradient;
  float projection;
};
__device__ inline Sums shuffle_xor(Sums value, int distance) {
  return {shuffle_xor(value.gradient, distance), shuffle_xor(value.projection, distance)};
}
__device__ inline Sums merge(Sums a, Sums b) { return {a.gradient + b.gradient, a.projection + b.projection}; }

// What is computed on one pack.
template <typename T, int LANES>
__device__ inline float sum(const Pack<T, LANES>& pack) {
  float values[LANES], result = 0.0f;
  unpack(pack, values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) result += values[i];
  return result;
}

template <typename T, int LANES>
__device__ inline float sum_of_squares(const Pack<T, LANES>& pack, float mean) {
  float values[LANES], result = 0.0f;
  unpack(pack, values);
#pragma unroll
  for (int i = 0; i < LANES; ++i) result += (values[i] - mean) * (values[i] - mean);
  return result;
}

template <typename T, int LANES>
__device__ inline Moments moments(const Pack<T, LANES>& pack) {
  const float mean = sum(pack) / LANES;
  return {LANES, mean, sum_of_squares(pack, mean)};
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> normalized(const Pack<T, LANES>& x, const Pack<T, LANES>& weight,
                                            const Pack<T, LANES>& bias, float mean, float rstd) {
  float values[LANES], weights[LANES], biases[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(bias, biases);
#pragma unroll
  for (int i = 0; i < LANES; ++i) values[i] = (values[i] - mean) * rstd * weights[i] + biases[i];
  return pack<T>(values);
}

template <typename T, int LANES>
__device__ inline Sums sums(const Pack<T, LANES>& x, const Pack<T, LANES>& weight, const Pack<T, LANES>& dy,
                            float mean, float rstd) {
  float values[LANES], weights[LANES], gradients[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(dy, gradients);
  Sums result = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    const float g = gradients[i] * weights[i];
    result = merge(result, {g, g * ((values[i] - mean) * rstd)});
  }
  return result;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> gradient(const Pack<T, LANES>& x, const Pack<T, LANES>& weight,
                                          const Pack<T, LANES>& dy, float mean, float rstd, Sums means) {
  float values[LANES], weights[LANES], gradients[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(dy, gradients);
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    const float n = (values[i] - mean) * rstd;
    values[i] = rstd * (gradients[i] * weights[i] - means.gradient - n * means.projection);
  }
  return pack<T>(values);
}

// dweight += dy n, dbias += dy
template <typename T, int LANES>
__device__ inline void accumulate(const Pack<T, LANES>& x, const Pack<T, LANES>& dy, float mean, float rstd,
                                  float (&dweight)[LANES], float (&dbias)[LANES]) {
  float values[LANES], gradients[LANES];
  unpack(x, values);
  unpack(dy, gradients);
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    dweight[i] += gradients[i] * ((values[i] - mean) * rstd);
    dbias[i] += gradients[i];
  }
}

// Where what the backward pass reads of the forward pass goes; null without one to come.
__device__ inline void save(float* mean, float* rstd, float row_mean, float row_rstd) {
  if (mean != nullptr && threadIdx.x == 0) {
    mean[blockIdx.x] = row_mean;
    rstd[blockIdx.x] = row_rstd;
  }
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_forward(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                  float* __restrict__ mean, float* __restrict__ rstd, int columns, float eps) {
  x += static_cast<long long>(blockIdx.x) * columns;
  y += static_cast<long long>(blockIdx.x) * columns;

  Pack<T, LANES> packs[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * LANES;
    packs[v] = column < columns ? load<LANES>(x + column) : filled<T, LANES>(0.0f);
  }

  float of_thread = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) of_thread += sum(packs[v]);
  const float row_mean = reduce_row<THREADS, 1, 0>(of_thread) / columns;

  of_thread = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    if ((v * THREADS + threadIdx.x) * LANES < columns) of_thread += sum_of_squares(packs[v], row_mean);
  const float row_rstd = rsqrtf(reduce_row<THREADS, 1, 1>(of_thread) / columns + eps);

  save(mean, rstd, row_mean, row_rstd);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * LANES;
    if (column < columns)
      store(y + column, normalized(packs[v], load<LANES>(weight + column), load<LANES>(bias + column),
                                   row_mean, row_rstd));
  }
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
  const Moments of_row = reduce_row<THREADS, 1>(of_thread);
  const float row_rstd = rsqrtf(of_row.squares / columns + eps);

  save(mean, rstd, of_row.mean, row_rstd);
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(y + column, normalized(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(bias + column),
                                 of_row.mean, row_rstd));
}

// A block takes every gridDim.x-th row; partial [2, gridDim.x, columns] gets its sums for dw and for db.
template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_backward(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ mean,
                   const float* __restrict__ rstd, const T* __restrict__ dy, T* __restrict__ dx,
                   float* __restrict__ partial, int rows, int columns) {
  float dweight[VECTORS][LANES] = {}, dbias[VECTORS][LANES] = {};

  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long start = static_cast<long long>(row) * columns;
    Pack<T, LANES> x_packs[VECTORS], dy_packs[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int column = (v * THREADS + threadIdx.x) * LANES;
      x_packs[v] = column < columns ? load<LANES>(x + start + column) : filled<T, LANES>(0.0f);
      dy_packs[v] = column < columns ? load<LANES>(dy + start + column) : filled<T, LANES>(0.0f);
    }

    const float row_mean = mean[row], row_rstd = rstd[row];
    Sums of_row = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int column = (v * THREADS + threadIdx.x) * LANES;
      if (column < columns)
        of_row = merge(of_row, sums(x_packs[v], load<LANES>(weight + column), dy_packs[v], row_mean, row_rstd));
    }
    of_row = reduce_row<THREADS, 1>(of_row);
    const Sums means = {of_row.gradient / columns, of_row.projection / columns};

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int column = (v * THREADS + threadIdx.x) * LANES;
      accumulate(x_packs[v], dy_packs[v], row_mean, row_rstd, dweight[v], dbias[v]);
      if (column < columns)
        store(dx + start + column,
              gradient(x_packs[v], load<LANES>(weight + column), dy_packs[v], row_mean, row_rstd, means));
    }
    __syncthreads();  // the next row is reduced in the same shared memory
  }

  float* of_weight = partial + static_cast<long long>(blockIdx.x) * columns;
  float* of_bias = of_weight + static_cast<long long>(gridDim.x) * columns;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * LANES;
    if (column < columns) {
      store(of_weight + column, pack<float>(dweight[v]));
      store(of_bias + column, pack<float>(dbias[v]));
    }
  }
}

// One block per row, any number of columns; dx alone.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_backward_streaming(const T* __restrict__ x, const T* __restrict__ weight, const float* __restrict__ mean,
                             const float* __restrict__ rstd, const T* __restrict__ dy, T* __restrict__ dx,
                             int columns) {
  x += static_cast<long long>(blockIdx.x) * columns;
  dy += static_cast<long long>(blockIdx.x) * columns;
  dx += static_cast<long long>(blockIdx.x) * columns;
  const float row_mean = mean[blockIdx.x], row_rstd = rstd[blockIdx.x];

  Sums of_row = {0.0f, 0.0f};
  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    of_row = merge(of_row, sums(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column),
                                row_mean, row_rstd));
  of_row = reduce_row<THREADS, 1>(of_row);
  const Sums means = {of_row.gradient / columns, of_row.projection / columns};

  for (int column = threadIdx.x * LANES; column < columns; column += THREADS * LANES)
    store(dx + column, gradient(load<LANES>(x + column), load<LANES>(weight + column), load<LANES>(dy + column),
                                row_mean, row_rstd, means));
}

// A block takes THREADS * LANES columns of every partials-th row; partial [2, partials, columns] as above.
template <typename T, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS)
layernorm_partials(const T* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                   const T* __restrict__ dy, float* __restrict__ partial, int partials, int rows, int columns) {
  const int group = blockIdx.x % partials;
  const int column = (blockIdx.x / partials * THREADS + threadIdx.x) * LANES;
  if (column >= columns) return;

  float dweight[LANES] = {}, dbias[LANES] = {};
#pragma unroll 4
  for (int row = group; row < rows; row += partials) {
    const long long at = static_cast<long long>(row) * columns + column;
    accumulate(load<LANES>(x + at), load<LANES>(dy + at), mean[row], rstd[row], dweight, dbias);
  }
  float* of_weight = partial + static_cast<long long>(group) * columns + column;
  store(of_weight, pack<float>(dweight));
  store(of_weight + static_cast<long long>(partials) * columns, pack<float>(dbias));
}

// Of partial [2, partials, columns]: the first half of the blocks sums dweight, the other dbias.
template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
layernorm_sum_partials(const float* __restrict__ partial, T* __restrict__ dweight, T* __restrict__ dbias,
                       int partials, int columns) {
  const int tiles = gridDim.x / 2;
  const bool of_bias = blockIdx.x >= tiles;
  const int column = (of_bias ? blockIdx.x - tiles : blockIdx.x) * 32 + threadIdx.x;
  if (of_bias) partial += static_cast<long long>(partials) * columns;
  const float sum = sum_rows<WARPS>(partial, partials, columns, column);
  if (threadIdx.y == 0 && column < columns) (of_bias ? dbias : dweight)[column] = from_float<T>(sum);
}
