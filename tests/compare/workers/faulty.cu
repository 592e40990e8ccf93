// A kernel that NVRTC refuses.
template <typename T>
__global__ void refused() {
  undeclared_function();
}
