// Gives libtorch one fake CUDA device, enough to trace and differentiate fake CUDA tensors.
//
// libtorch calls three objects about CUDA: the CUDA hooks ("is there a device?"), the device guard ("switch to it",
// "which stream?") and, for scaled_dot_product_attention, a function that picks the kernel. A CPU build has none of
// them, and a CUDA build's own need a driver. This file replaces them by objects that need no driver. They cannot
// allocate or launch anything.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace {

const c10::Device only_device(c10::DeviceType::CUDA, 0);

class FakeHooks final : public at::CUDAHooksInterface {
 public:
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

// libtorch's no-op guard answers with device -1 and throws on events; the autograd engine needs device 0 and events.
class FakeGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
 public:
  c10::Device getDevice() const override { return only_device; }
  c10::Device exchangeDevice(c10::Device) const override { return only_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return default_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return default_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return default_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return default_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream default_stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, only_device); }
};

int64_t recorded_sdpa_choice = static_cast<int64_t>(at::SDPBackend::error);

// On a real GPU the choice depends on architecture, library versions and shapes. Without a recorded choice, only a call
// with a single enabled backend (torch.nn.attention.sdpa_kernel) has an answer.
int64_t choose_sdpa(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
                    double, bool, std::optional<double>, bool) {
  const auto& context = at::globalContext();
  const std::pair<bool, at::SDPBackend> backends[] = {
      {context.userEnabledFlashSDP(), at::SDPBackend::flash_attention},
      {context.userEnabledMemEfficientSDP(), at::SDPBackend::efficient_attention},
      {context.userEnabledCuDNNSDP(), at::SDPBackend::cudnn_attention},
      {context.userEnabledMathSDP(), at::SDPBackend::math},
  };
  int enabled = 0;
  int64_t only = recorded_sdpa_choice;
  for (const auto& [is_enabled, backend] : backends) {
    if (is_enabled) {
      ++enabled;
      only = static_cast<int64_t>(backend);
    }
  }
  if (enabled == 1) {
    return only;
  }
  TORCH_CHECK(recorded_sdpa_choice != static_cast<int64_t>(at::SDPBackend::error),
              "which kernel the GPU picks for scaled_dot_product_attention is not known here: give sdpa=, ",
              "or enable one backend only");
  // The flash kernel takes no mask and would ignore it.
  if (mask.has_value() && recorded_sdpa_choice == static_cast<int64_t>(at::SDPBackend::flash_attention)) {
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  }
  return recorded_sdpa_choice;
}

}  // namespace

// Sets the backend that choose_sdpa returns, as a value of at::SDPBackend; error (-1) for none.
extern "C" void record_sdpa_choice(int64_t backend) { recorded_sdpa_choice = backend; }

// Called once, after libtorch is loaded and before anything queries it about CUDA. A CUDA build registers its hooks with
// the default priority, so the preferred priority replaces them.
extern "C" void install_fake_cuda() {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<FakeHooks>(); }, c10::REGISTRY_PREFERRED);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(new FakeGuard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_sdpa);
}
