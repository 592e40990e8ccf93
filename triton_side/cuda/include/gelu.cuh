// GELU, tanh form, and its derivative in fp32: y = 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
//
// Both use 0.5 (1 + tanh(u)) = sigmoid(2u). It needs one exponential and one reciprocal, has no branch as tanhf has, and
// does not cancel as 1 + tanh(u) does for negative u.
#pragma once

constexpr float LINEAR = 0.7978845608028654f;               // u = LINEAR x + CUBIC x^3
constexpr float CUBIC = 0.7978845608028654f * 0.044715f;
constexpr float MINUS_2_LOG2_E = -2.8853900817779268f;       // exp(-2u) = 2^(MINUS_2_LOG2_E u)

__device__ inline float exponent(float x) { return x * (MINUS_2_LOG2_E * LINEAR + MINUS_2_LOG2_E * CUBIC * (x * x)); }

__device__ inline float gelu(float x) { return x * __fdividef(1.0f, 1.0f + exp2f(exponent(x))); }

// s + s (1 - s) 2x du/dx, s = sigmoid(2u).
//
// 1 - s would lose all digits for large x, where 2x du/dx is large, so s and 1 - s both come from exp(-2|u|).
// Beyond |x| = 16 the second term is 0 in fp32, but du/dx ~ x^2 can overflow there and 0 * inf is NaN. The second term
// therefore uses x clamped to +-16.
__device__ inline float gelu_derivative(float x) {
  const float decay = exp2f(-fabsf(exponent(x)));
  const float upper = __fdividef(1.0f, 1.0f + decay);  // sigmoid(2|u|)
  const float lower = decay * upper;                   // 1 - sigmoid(2|u|)
  const float s = x < 0.0f ? lower : upper;
  const float t = fminf(fmaxf(x, -16.0f), 16.0f);
  const float two_x_du = t * (2.0f * LINEAR + 6.0f * CUBIC * (t * t));
  return s + upper * lower * two_x_du;
}
