"""A kernel in which a warp tells 128 threads numbers through shared memory: mbarrier_program.py one|all.

An mbarrier says that a number is there, and another one that it was read. one: one thread arrives for all, after a
barrier of all, as in Triton. all: each thread arrives.
"""

import sys

import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = r"""
__device__ void init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count));
}
__device__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ void wait(unsigned barrier, int phase) {
  asm volatile("{\n .reg .pred complete;\n waitLoop:\n"
               " mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
               " @!complete bra waitLoop;\n}\n" :: "r"(barrier), "r"(phase) : "memory");
}
extern "C" __global__ void tell(int *sums) {
  __shared__ unsigned long long barriers[2];
  __shared__ volatile int number;
  unsigned full = (unsigned)__cvta_generic_to_shared(&barriers[0]);
  unsigned empty = (unsigned)__cvta_generic_to_shared(&barriers[1]);
  int thread = threadIdx.x, sum = 0;
  if (thread == 0) {
    init(full, ONE ? 1 : 32);
    init(empty, ONE ? 1 : 128);
  }
  __syncthreads();
  for (int n = 0; n < 4; n++) {
    if (thread >= 128) {
      wait(empty, (n & 1) ^ 1);
      number = n;
      if (ONE) __syncwarp();
      if (!ONE || thread == 128) arrive(full);
    } else {
      wait(full, n & 1);
      sum += number;
      if (ONE) asm volatile("bar.sync 2, 128;" ::: "memory");
      if (!ONE || thread == 0) arrive(empty);
    }
  }
  if (thread < 128) sums[thread] = sum;
}
"""


def main(arriving: str) -> None:
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    source = f"#define ONE {int(arriving == 'one')}\n{SOURCE}"
    program = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}", std="c++17"))
    kernel = program.compile("cubin").get_kernel("tell")
    sums = torch.zeros(128, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    launch(stream, LaunchConfig(grid=1, block=160), kernel, sums.data_ptr())
    stream.sync()
    assert sums.tolist() == [6] * 128


main(sys.argv[1])
