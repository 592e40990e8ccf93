// Threefry-2x32-13 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). Random words are a function of
// a key and a counter, so dropout draws its mask again instead of storing it.
#pragma once

#include "pack.cuh"

struct Words {
  unsigned first;
  unsigned second;
};

// Two random words for a counter. Every four rounds a word of the key is added; the thirteenth round is the last.
__device__ inline Words threefry_2x32(Words key, Words counter) {
  constexpr int ROUNDS = 13;
  constexpr int ROTATIONS[] = {13, 15, 26, 6, 17, 29, 16, 24};
  const unsigned keys[] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDA};
  Words words = {counter.first + keys[0], counter.second + keys[1]};
#pragma unroll
  for (int done = 1; done <= ROUNDS; ++done) {
    const int rotation = ROTATIONS[(done - 1) % 8];
    words.first += words.second;
    words.second = (words.second << rotation | words.second >> (32 - rotation)) ^ words.first;
    if (done % 4 == 0) {
      words.first += keys[done / 4 % 3];
      words.second += keys[(done / 4 + 1) % 3] + done / 4;
    }
  }
  return words;
}

// Integers from 0 to 65535 for the LANES columns of a row from `column` on. Counter (c / 4, row) gives 64 bits, and
// column c gets their 16 bits number c % 4, the lowest first. One call serves four columns, so LANES and `column` are
// multiples of 4 unless LANES is 1.
template <int LANES>
__device__ inline Pack<unsigned short, LANES> uniforms(Words key, unsigned row, unsigned column) {
  Pack<unsigned short, LANES> result;
  if constexpr (LANES == 1) {
    const Words words = threefry_2x32(key, {column / 4, row});
    const unsigned word = column % 4 < 2 ? words.first : words.second;
    result.value = static_cast<unsigned short>(word >> column % 2 * 16);
  } else {
#pragma unroll
    for (int i = 0; i < LANES / 4; ++i) {
      const Words words = threefry_2x32(key, {column / 4 + i, row});
      result.words[2 * i] = words.first;
      result.words[2 * i + 1] = words.second;
    }
  }
  return result;
}

// The i-th of these integers.
template <int LANES>
__device__ inline int uniform(const Pack<unsigned short, LANES>& pack, int i) {
  if constexpr (LANES == 1)
    return pack.value;
  else
    return pack.words[i / 2] >> i % 2 * 16 & 0xffff;
}
