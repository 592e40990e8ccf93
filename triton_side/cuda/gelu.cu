// GELU, tanh form, and its gradient: y = gelu(x), dx = dy gelu'(x).
#include "include/elementwise.cuh"
#include "include/gelu.cuh"

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
gelu_forward(const T* __restrict__ x, T* __restrict__ y, long long elements) {
  const auto value = [](const float (&values)[1]) { return gelu(values[0]); };
  map_tile<THREADS, VECTORS, LANES>(value, elements, y, x);
}

template <typename T, int LANES, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS)
gelu_backward(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx, long long elements) {
  const auto gradient = [](const float (&values)[2]) { return values[1] * gelu_derivative(values[0]); };
  map_tile<THREADS, VECTORS, LANES>(gradient, elements, dx, x, dy);
}
