// out[i] = function({in_0[i], in_1[i], ...}) for one tile of THREADS * VECTORS * LANES elements per block.
#pragma once

#include "pack.cuh"

// All loads of a tile are issued before the first value is used. VECTORS * (number of inputs) 16-byte requests per
// thread are then in flight at once, which hides the latency of device memory.
template <int THREADS, int VECTORS, int LANES, typename Function, typename T, typename... Inputs>
__device__ void map_tile(Function function, long long elements, T* out, const Inputs*... inputs) {
  constexpr int INPUTS = sizeof...(inputs);
  constexpr int TILE = THREADS * VECTORS * LANES;
  const long long start = static_cast<long long>(blockIdx.x) * TILE;

  if (start + TILE <= elements) {
    Pack<T, LANES> packs[INPUTS][VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const long long at = start + (v * THREADS + threadIdx.x) * LANES;
      int input = 0;
      ((packs[input++][v] = load<LANES>(inputs + at)), ...);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float in[INPUTS][LANES], result[LANES];
#pragma unroll
      for (int input = 0; input < INPUTS; ++input) unpack(packs[input][v], in[input]);
#pragma unroll
      for (int i = 0; i < LANES; ++i) {
        float values[INPUTS];
#pragma unroll
        for (int input = 0; input < INPUTS; ++input) values[input] = in[input][i];
        result[i] = function(values);
      }
      store(out + start + (v * THREADS + threadIdx.x) * LANES, pack<T>(result));
    }
  } else {  // the last, incomplete tile: element by element
#pragma unroll 1
    for (long long at = start + threadIdx.x; at < elements; at += THREADS) {
      const float values[INPUTS] = {to_float(inputs[at])...};
      out[at] = from_float<T>(function(values));
    }
  }
}
