// Bias, dropout, residual sum and LayerNorm over the columns of a matrix, and their gradients.
//
//   forward   h  = residual + m (x + bias),  m = scale where kept, else 0
//             y  = n weight + shift,  n = (h - mean) rstd              in fp32, from h rounded as it is stored
//   backward  dh_total = dh + rstd (g - mean(g) - n mean(g n)),  g = dy weight;  dh: the gradient of the output h
//             dresidual = dh_total,  dx = m dh_total
//             dbias, dweight, dshift = sums over rows of dx, dy n and dy
//
// A block takes a row, reads it once and holds it in registers: VECTORS packs of LANES elements in each of THREADS
// threads. In the backward pass a thread also keeps three fp32 sums for each of its columns, so a cluster of blocks
// shares a long row. Sums over rows use no atomics: a block or cluster writes those of its rows, and
// dropout_residual_norm_sum_partials adds them up. Each pass draws the mask itself, the forward pass while loads are in
// flight.
#include "include/column_sums.cuh"
#include "include/normalise.cuh"
#include "include/threefry.cuh"

struct Dropout {
  Words key;
  int threshold;  // a value is kept if its random number is at least this
  float scale;
};

__device__ inline Dropout dropout_of(const int* seed, int threshold, float scale) {
  return {{static_cast<unsigned>(seed[0]), static_cast<unsigned>(seed[1])}, threshold, scale};
}

// Dropout of a pack's i-th value. A dropped NaN or infinity becomes 0, too.
template <int LANES>
__device__ inline float dropped(float value, const Pack<unsigned short, LANES>& mask, int i, const Dropout& dropout) {
  return uniform(mask, i) >= dropout.threshold ? value * dropout.scale : 0.0f;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> dropped_sum(const Pack<T, LANES>& x, const Pack<T, LANES>& bias,
                                             const Pack<T, LANES>& residual, const Pack<unsigned short, LANES>& mask,
                                             const Dropout& dropout) {
  float values[LANES], biases[LANES], residuals[LANES];
  unpack(x, values);
  unpack(bias, biases);
  unpack(residual, residuals);
#pragma unroll
  for (int i = 0; i < LANES; ++i)
    values[i] = residuals[i] + dropped(values[i] + biases[i], mask, i, dropout);
  return pack<T>(values);
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
dropout_residual_norm_forward(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
                              const T* __restrict__ weight, const T* __restrict__ shift, const int* __restrict__ seed,
                              T* __restrict__ y, T* __restrict__ h, float* __restrict__ mean, float* __restrict__ rstd,
                              int columns, int threshold, float scale, float eps) {
  const long long start = static_cast<long long>(blockIdx.x) * columns;
  const int first = static_cast<int>(threadIdx.x) * LANES;
  const Dropout dropout = dropout_of(seed, threshold, scale);
  Pack<T, LANES> packs[VECTORS], residuals[VECTORS];  // packs hold x first, then h
  load_row<THREADS>(packs, x + start, first, columns);
  load_row<THREADS>(residuals, residual + start, first, columns);

#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = first + v * THREADS * LANES;
    if (column < columns) {
      const auto mask = uniforms<LANES>(dropout.key, blockIdx.x, column);
      packs[v] = dropped_sum(packs[v], load<LANES>(bias + column), residuals[v], mask, dropout);
      store(h + start + column, packs[v]);
    }
  }

  const Statistics of_row = statistics<THREADS>(packs, columns, eps);
  save(mean, rstd, of_row);
  store_normalized<THREADS>(packs, weight, shift, y + start, columns, of_row);
}

// The arguments of the backward kernels.
template <typename T>
struct Backward {
  const T* h;
  const T* weight;
  const int* seed;
  const float* mean;
  const float* rstd;
  const T* dy;
  const T* dh;
  T* dx;
  T* dresidual;
  float* partial;
  int rows;
  int columns;
};

// A cluster takes every clusters-th row; partial [3, clusters, columns] gets its sums for dbias, dweight and dshift.
template <int LANES, int VECTORS, int THREADS, int CLUSTER, typename T>
__device__ inline void backward(const Backward<T>& of, int threshold, float scale) {
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int first = (blockIdx.x % CLUSTER * VECTORS * THREADS + static_cast<int>(threadIdx.x)) * LANES;
  const Dropout dropout = dropout_of(of.seed, threshold, scale);
  float dbias[VECTORS][LANES] = {}, dweight[VECTORS][LANES] = {}, dshift[VECTORS][LANES] = {};

  for (int row = cluster; row < of.rows; row += clusters) {
    const long long start = static_cast<long long>(row) * of.columns;
    Pack<T, LANES> h[VECTORS], dy[VECTORS], dh[VECTORS];
    load_row<THREADS>(h, of.h + start, first, of.columns);
    load_row<THREADS>(dy, of.dy + start, first, of.columns);
    load_row<THREADS>(dh, of.dh + start, first, of.columns);

    const Statistics of_row = {of.mean[row], of.rstd[row]};
    const Sums means = mean_gradients<true, THREADS, CLUSTER>(h, of.weight, dy, first, of.columns, of_row);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int column = first + v * THREADS * LANES;
      accumulate(h[v], dy[v], of_row, dweight[v], dshift[v]);
      if (column < of.columns) {
        float total[LANES], of_norm[LANES];
        unpack(dh[v], total);
        gradient(h[v], load<LANES>(of.weight + column), dy[v], of_row, means, of_norm);
#pragma unroll
        for (int i = 0; i < LANES; ++i) total[i] += of_norm[i];
        store(of.dresidual + start + column, pack<T>(total));
        const auto mask = uniforms<LANES>(dropout.key, row, column);
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
          total[i] = dropped(total[i], mask, i, dropout);
          dbias[v][i] += total[i];
        }
        store(of.dx + start + column, pack<T>(total));
      }
    }
    __syncthreads();  // the next row is reduced in the same shared memory
  }

  const long long vector = static_cast<long long>(clusters) * of.columns;
  float* partial = of.partial + static_cast<long long>(cluster) * of.columns;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = first + v * THREADS * LANES;
    if (column < of.columns) {
      store(partial + column, pack<float>(dbias[v]));
      store(partial + vector + column, pack<float>(dweight[v]));
      store(partial + 2 * vector + column, pack<float>(dshift[v]));
    }
  }
}

// RESIDENT: blocks that share a multiprocessor and its registers.
template <typename T, int LANES, int VECTORS, int THREADS, int RESIDENT>
__global__ void __launch_bounds__(THREADS, RESIDENT)
dropout_residual_norm_backward(const T* __restrict__ h, const T* __restrict__ weight, const int* __restrict__ seed,
                               const float* __restrict__ mean, const float* __restrict__ rstd,
                               const T* __restrict__ dy, const T* __restrict__ dh, T* __restrict__ dx,
                               T* __restrict__ dresidual, float* __restrict__ partial, int rows, int columns,
                               int threshold, float scale) {
  backward<LANES, VECTORS, THREADS, 1, T>({h, weight, seed, mean, rstd, dy, dh, dx, dresidual, partial, rows, columns},
                                          threshold, scale);
}

#if __CUDA_ARCH__ >= 900
template <typename T, int LANES, int VECTORS, int THREADS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS)
dropout_residual_norm_backward_cluster(const T* __restrict__ h, const T* __restrict__ weight,
                                       const int* __restrict__ seed, const float* __restrict__ mean,
                                       const float* __restrict__ rstd, const T* __restrict__ dy,
                                       const T* __restrict__ dh, T* __restrict__ dx, T* __restrict__ dresidual,
                                       float* __restrict__ partial, int rows, int columns, int threshold,
                                       float scale) {
  backward<LANES, VECTORS, THREADS, CLUSTER, T>(
      {h, weight, seed, mean, rstd, dy, dh, dx, dresidual, partial, rows, columns}, threshold, scale);
}
#endif

// Sums partial [3, partials, columns]: a third of the blocks each for dbias, dweight and dshift.
template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
dropout_residual_norm_sum_partials(const float* __restrict__ partial, T* __restrict__ dbias, T* __restrict__ dweight,
                                   T* __restrict__ dshift, int partials, int columns) {
  const int tiles = gridDim.x / 3, vector = blockIdx.x / tiles;
  partial += static_cast<long long>(vector) * partials * columns;
  T* sums = vector == 0 ? dbias : vector == 1 ? dweight : dshift;
  sum_columns<WARPS>(partial, sums, partials, columns, blockIdx.x % tiles);
}
