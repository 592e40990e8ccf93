// Vectorised memory access to 16-bit and 32-bit floats, and their conversion to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// One float of any of the three dtypes, to and from fp32 (round to nearest even).
__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T> __device__ T from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Two 16-bit floats in one 32-bit register.
template <typename T> __device__ float2 unpack_pair(unsigned word);
template <> __device__ inline float2 unpack_pair<__half>(unsigned word) {
  return {__half2float(__ushort_as_half(word & 0xffff)), __half2float(__ushort_as_half(word >> 16))};
}
template <> __device__ inline float2 unpack_pair<__nv_bfloat16>(unsigned word) {  // bf16 is the upper half of an fp32
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
}

template <typename T> __device__ unsigned pack_pair(float low, float high);
template <> __device__ inline unsigned pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <> __device__ inline unsigned pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// LANES neighbouring elements, moved by one instruction. The alignment lets the compiler emit a 128-bit access for 16
// bytes (LDG.E.128). The elements are stored as words: behind a bounds check the compiler gives each element of a 16-bit
// array its own register (softmax_backward on bf16: 400 instead of 320 instructions).
template <typename T, int LANES>
struct alignas(sizeof(T) * LANES) Pack {
  unsigned words[sizeof(T) * LANES / sizeof(unsigned)];
};

// An ordinary scalar access, legal at any address.
template <typename T>
struct Pack<T, 1> {
  T value;
};

template <int LANES, typename T>
__device__ inline Pack<T, LANES> load(const T* address) {
  return *reinterpret_cast<const Pack<T, LANES>*>(address);
}

template <int LANES, typename T>
__device__ inline void store(T* address, const Pack<T, LANES>& pack) {
  *reinterpret_cast<Pack<T, LANES>*>(address) = pack;
}

template <typename T, int LANES>
__device__ inline void unpack(const Pack<T, LANES>& pack, float (&values)[LANES]) {
  if constexpr (LANES == 1) {
    values[0] = to_float(pack.value);
  } else if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
    for (int i = 0; i < LANES; ++i) values[i] = __uint_as_float(pack.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < LANES / 2; ++i) {
      const float2 pair = unpack_pair<T>(pack.words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> pack(const float (&values)[LANES]) {
  Pack<T, LANES> result;
  if constexpr (LANES == 1) {
    result.value = from_float<T>(values[0]);
  } else if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
    for (int i = 0; i < LANES; ++i) result.words[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < LANES / 2; ++i) result.words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
  }
  return result;
}

template <typename T, int LANES>
__device__ inline Pack<T, LANES> filled(float value) {
  float values[LANES];
#pragma unroll
  for (int i = 0; i < LANES; ++i) values[i] = value;
  return pack<T>(values);
}
