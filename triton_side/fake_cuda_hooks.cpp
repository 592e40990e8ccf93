// Makes libtorch believe in one CUDA device, enough to trace and differentiate fake CUDA tensors.
//
// libtorch asks two objects about CUDA: the CUDA hooks ("is there a device?") and the device guard ("switch to it", "which
// stream?"). A CPU build has neither; the CUDA build's own need a driver. Both are replaced here by ones that answer without
// doing anything. Nothing can be allocated or launched through them.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

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

// The no-op guard of libtorch answers with device -1 and throws on events; the autograd engine needs device 0 and records events.
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

}  // namespace

// Called once, after libtorch is loaded and before anything asks it about CUDA. The preferred priority takes the place of a
// CUDA build's hooks, which are registered with the default one.
extern "C" void install_fake_cuda() {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<FakeHooks>(); }, c10::REGISTRY_PREFERRED);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(new FakeGuard());
}
