// Layer norm and RMSNorm of rows, forward and backward. RMSNorm is layer norm with a mean of 0 and no bias. A thread holds its share of a row as packs of LANES elements.
//
//   n = (x - mean(x)) rstd,  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps),  y = n weight + bias
//   dx = rstd (g - mean(g) - n mean(g n)),  g = dy weight
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

struct Statistics {  // of a row
  float mean;
  float rstd;
};

struct Sums {  // of g and of g n
  float gradient;
  float projection;
};
__device__ inline Sums shuffle_xor(Sums value, int distance) {
  return {shuffle_xor(value.gradient, distance), shuffle_xor(value.projection, distance)};
}
__device__ inline Sums merge(Sums a, Sums b) { return {a.gradient + b.gradient, a.projection + b.projection}; }

// Functions of one pack.
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
__device__ inline Pack<T, LANES> normalized(const Pack<T, LANES>& x, const Pack<T, LANES>& weight,
                                            const Pack<T, LANES>& bias, Statistics of_row) {
  float values[LANES], weights[LANES], biases[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(bias, biases);
#pragma unroll
  for (int i = 0; i < LANES; ++i) values[i] = (values[i] - of_row.mean) * of_row.rstd * weights[i] + biases[i];
  return pack<T>(values);
}

template <typename T, int LANES>
__device__ inline Sums sums(const Pack<T, LANES>& x, const Pack<T, LANES>& weight, const Pack<T, LANES>& dy,
                            Statistics of_row) {
  float values[LANES], weights[LANES], gradients[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(dy, gradients);
  Sums result = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    const float g = gradients[i] * weights[i];
    result = merge(result, {g, g * ((values[i] - of_row.mean) * of_row.rstd)});
  }
  return result;
}

// dx; `means` holds mean(g) and mean(g n).
template <typename T, int LANES>
__device__ inline void gradient(const Pack<T, LANES>& x, const Pack<T, LANES>& weight, const Pack<T, LANES>& dy,
                                Statistics of_row, Sums means, float (&dx)[LANES]) {
  float values[LANES], weights[LANES], gradients[LANES];
  unpack(x, values);
  unpack(weight, weights);
  unpack(dy, gradients);
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    const float n = (values[i] - of_row.mean) * of_row.rstd;
    dx[i] = of_row.rstd * (gradients[i] * weights[i] - means.gradient - n * means.projection);
  }
}

// dweight += dy n, dbias += dy
template <typename T, int LANES>
__device__ inline void accumulate(const Pack<T, LANES>& x, const Pack<T, LANES>& dy, Statistics of_row,
                                  float (&dweight)[LANES], float (&dbias)[LANES]) {
  float values[LANES], gradients[LANES];
  unpack(x, values);
  unpack(dy, gradients);
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    dweight[i] += gradients[i] * ((values[i] - of_row.mean) * of_row.rstd);
    dbias[i] += gradients[i];
  }
}

// Saves a row's statistics for the backward pass; the pointers are null if none will follow. A block has one row.
__device__ inline void save(float* rstd, float of_row) {
  if (rstd != nullptr && threadIdx.x == 0) rstd[blockIdx.x] = of_row;
}
__device__ inline void save(float* mean, float* rstd, Statistics of_row) {
  if (mean != nullptr && threadIdx.x == 0) {
    mean[blockIdx.x] = of_row.mean;
    rstd[blockIdx.x] = of_row.rstd;
  }
}

// Loads a block's share of a row. A thread's pack v holds the columns from first + v * THREADS * LANES on, zeros past
// the end of the row. `first` is threadIdx.x * LANES if the block has the whole row.
template <int THREADS, typename T, int LANES, int VECTORS>
__device__ inline void load_row(Pack<T, LANES> (&packs)[VECTORS], const T* row, int first, int columns) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = first + v * THREADS * LANES;
    packs[v] = column < columns ? load<LANES>(row + column) : filled<T, LANES>(0.0f);
  }
}

template <int THREADS, typename T, int LANES, int VECTORS>
__device__ inline Statistics statistics(const Pack<T, LANES> (&packs)[VECTORS], int columns, float eps) {
  float of_thread = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) of_thread += sum(packs[v]);
  const float row_mean = reduce_row<THREADS, 1, 0>(of_thread) / columns;

  of_thread = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    if ((v * THREADS + threadIdx.x) * LANES < columns) of_thread += sum_of_squares(packs[v], row_mean);
  return {row_mean, rsqrtf(reduce_row<THREADS, 1, 1>(of_thread) / columns + eps)};
}

template <int THREADS, typename T, int LANES, int VECTORS>
__device__ inline void store_normalized(const Pack<T, LANES> (&packs)[VECTORS], const T* weight, const T* bias, T* y,
                                        int columns, Statistics of_row) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * LANES;
    if (column < columns)
      store(y + column, normalized(packs[v], load<LANES>(weight + column), load<LANES>(bias + column), of_row));
  }
}

// mean(g) and mean(g n) of a row that CLUSTER blocks share. RMSNorm's rows are not CENTRED: the first is 0.
template <bool CENTRED, int THREADS, int CLUSTER, typename T, int LANES, int VECTORS>
__device__ inline Sums mean_gradients(const Pack<T, LANES> (&x)[VECTORS], const T* weight,
                                      const Pack<T, LANES> (&dy)[VECTORS], int first, int columns, Statistics of_row) {
  Sums result = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = first + v * THREADS * LANES;
    if (column < columns) result = merge(result, sums(x[v], load<LANES>(weight + column), dy[v], of_row));
  }
  if constexpr (!CENTRED) return {0.0f, reduce_row<THREADS, CLUSTER>(result.projection) / columns};
  result = reduce_row<THREADS, CLUSTER>(result);
  return {result.gradient / columns, result.projection / columns};
}

// The kernels of layer norm's and RMSNorm's gradients. RMSNorm's rows are not CENTRED: it has neither mean nor dbias.
//
// A block takes every gridDim.x-th row; partial [gridDim.x, columns] gets its sums for dweight, and after it a matrix
// of this shape those for dbias.
template <bool CENTRED, int THREADS, int LANES, int VECTORS, typename T>
__device__ inline void norm_backward(const T* __restrict__ x, const T* __restrict__ weight,
                                     const float* __restrict__ mean, const float* __restrict__ rstd,
                                     const T* __restrict__ dy, T* __restrict__ dx, float* __restrict__ partial,
                                     int rows, int columns) {
  const int first = static_cast<int>(threadIdx.x) * LANES;
  float dweight[VECTORS][LANES] = {}, dbias[VECTORS][LANES] = {};

  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long start = static_cast<long long>(row) * columns;
    Pack<T, LANES> x_packs[VECTORS], dy_packs[VECTORS];
    load_row<THREADS>(x_packs, x + start, first, columns);
    load_row<THREADS>(dy_packs, dy + start, first, columns);

    const Statistics of_row = {CENTRED ? mean[row] : 0.0f, rstd[row]};
    const Sums means = mean_gradients<CENTRED, THREADS, 1>(x_packs, weight, dy_packs, first, columns, of_row);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int column = first + v * THREADS * LANES;
      accumulate(x_packs[v], dy_packs[v], of_row, dweight[v], dbias[v]);
      if (column < columns) {
        float gradients[LANES];
        gradient(x_packs[v], load<LANES>(weight + column), dy_packs[v], of_row, means, gradients);
        store(dx + start + column, pack<T>(gradients));
      }
    }
    __syncthreads();  // the next row is reduced in the same shared memory
  }

  float* of_weight = partial + static_cast<long long>(blockIdx.x) * columns;
  float* of_bias = of_weight + static_cast<long long>(gridDim.x) * columns;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = first + v * THREADS * LANES;
    if (column < columns) {
      store(of_weight + column, pack<float>(dweight[v]));
      if constexpr (CENTRED) store(of_bias + column, pack<float>(dbias[v]));
    }
  }
}

// A block takes THREADS * LANES columns of every partials-th row; partial is as in norm_backward, for partials blocks.
template <bool CENTRED, int THREADS, int LANES, typename T>
__device__ inline void norm_partials(const T* __restrict__ x, const float* __restrict__ mean,
                                     const float* __restrict__ rstd, const T* __restrict__ dy,
                                     float* __restrict__ partial, int partials, int rows, int columns) {
  const int group = blockIdx.x % partials;
  const int column = (blockIdx.x / partials * THREADS + threadIdx.x) * LANES;
  if (column >= columns) return;

  float dweight[LANES] = {}, dbias[LANES] = {};
#pragma unroll 4
  for (int row = group; row < rows; row += partials) {
    const long long at = static_cast<long long>(row) * columns + column;
    accumulate(load<LANES>(x + at), load<LANES>(dy + at), {CENTRED ? mean[row] : 0.0f, rstd[row]}, dweight, dbias);
  }
  partial += static_cast<long long>(group) * columns + column;
  store(partial, pack<float>(dweight));
  if constexpr (CENTRED) store(partial + static_cast<long long>(partials) * columns, pack<float>(dbias));
}
