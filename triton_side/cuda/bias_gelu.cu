// y = gelu(z), z = x + bias, and its gradients dx = dy gelu'(z), dbias = sum over rows of dx; x, y [rows, columns].
//
// A thread has LANES neighbouring columns. It loads their bias once and sums their share of dbias in registers, so no
// thread waits for another. A block has THREADS such sets of columns, and loads ROWS rows at once.
#include "include/column_sums.cuh"
#include "include/gelu.cuh"
#include "include/pack.cuh"

// Several blocks can have the same columns; each of them takes a group of the rows.
struct Position {
  int column;  // the first one of this thread
  int group;   // of rows, of this block
  int groups;
};

template <int LANES, int THREADS>
__device__ inline Position position_in_matrix(int columns) {
  const int blocks = (columns - 1) / (THREADS * LANES) + 1;
  const int block = static_cast<int>(blockIdx.x);
  return {(block % blocks * THREADS + static_cast<int>(threadIdx.x)) * LANES, block / blocks,
          static_cast<int>(gridDim.x) / blocks};
}

// Loads ROWS rows of this thread's columns, with zeros past the last row. All loads start before a value is used.
template <int LANES, int ROWS, typename T>
__device__ inline void load_rows(Pack<T, LANES> (&packs)[ROWS], const T* matrix, long long row, long long rows,
                                 int columns) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    packs[r] = row + r < rows ? load<LANES>(matrix + (row + r) * columns) : filled<T, LANES>(0.0f);
}

template <typename T, int LANES, int ROWS, int THREADS>
__global__ void __launch_bounds__(THREADS)
bias_gelu_forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, long long rows, int columns) {
  const Position here = position_in_matrix<LANES, THREADS>(columns);
  if (here.column >= columns) return;
  const long long row = static_cast<long long>(here.group) * ROWS;
  Pack<T, LANES> packs[ROWS];
  load_rows(packs, x + here.column, row, rows, columns);
  float shift[LANES];
  unpack(load<LANES>(bias + here.column), shift);

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (row + r >= rows) return;
    float values[LANES];
    unpack(packs[r], values);
#pragma unroll
    for (int i = 0; i < LANES; ++i) values[i] = gelu(values[i] + shift[i]);
    store(y + here.column + (row + r) * columns, pack<T>(values));
  }
}

// partial [groups, columns] gets each group's sums for dbias.
template <typename T, int LANES, int ROWS, int THREADS>
__global__ void __launch_bounds__(THREADS)
bias_gelu_backward(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ dy, T* __restrict__ dx,
                   float* __restrict__ partial, long long rows, int columns) {
  const Position here = position_in_matrix<LANES, THREADS>(columns);
  if (here.column >= columns) return;
  float shift[LANES], sums[LANES] = {};
  unpack(load<LANES>(bias + here.column), shift);

  const long long step = static_cast<long long>(here.groups) * ROWS;
  for (long long row = static_cast<long long>(here.group) * ROWS; row < rows; row += step) {
    Pack<T, LANES> x_packs[ROWS], dy_packs[ROWS];
    load_rows(x_packs, x + here.column, row, rows, columns);
    load_rows(dy_packs, dy + here.column, row, rows, columns);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (row + r >= rows) break;
      float values[LANES], gradients[LANES];
      unpack(x_packs[r], values);
      unpack(dy_packs[r], gradients);
#pragma unroll
      for (int i = 0; i < LANES; ++i) {
        gradients[i] *= gelu_derivative(values[i] + shift[i]);
        sums[i] += gradients[i];
      }
      store(dx + here.column + (row + r) * columns, pack<T>(gradients));
    }
  }
  store(partial + here.column + static_cast<long long>(here.group) * columns, pack<float>(sums));
}

// dbias = sum over rows of partial.
template <typename T, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
bias_gelu_sum_partials(const float* __restrict__ partial, T* __restrict__ dbias, int partials, int columns) {
  sum_columns<WARPS>(partial, dbias, partials, columns, blockIdx.x);
}
