// Tells torch's C++ side, on a build without CUDA, that there are CUDA devices. Autograd and the
// dispatcher ask it for the current device; `tensors.py` does all that tensors do.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr DeviceIndex NUM_DEVICES = 6;
std::atomic<int> first{0};  // device of threads that have chosen none, such as those of autograd
thread_local DeviceIndex chosen = -1;

DeviceIndex current() { return chosen < 0 ? static_cast<DeviceIndex>(first) : chosen; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return CUDA; }
    Device getDevice() const override { return {CUDA, current()}; }
    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        uncheckedSetDevice(device);
        return before;
    }
    void setDevice(Device device) const override { uncheckedSetDevice(device); }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.index() >= 0) chosen = device.index();
    }
    Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
    Stream getDefaultStream(Device device) const override { return getStream(device); }
    Stream getNewStream(Device device, int) const override { return getStream(device); }
    Stream exchangeStream(Stream stream) const override { return stream; }
    DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
    bool queryStream(const Stream&) const override { return true; }
    bool queryEvent(void*) const override { return true; }
    void synchronizeStream(const Stream&) const override {}
    void synchronizeEvent(void*) const override {}
    void synchronizeDevice(const DeviceIndex) const override {}
    void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return NUM_DEVICES; }
    DeviceIndex getCurrentDevice() const override { return current(); }
    DeviceIndex current_device() const override { return current(); }
    void setCurrentDevice(DeviceIndex device) const override { chosen = device; }
    bool isPinnedPtr(const void*) const override { return false; }
};

const c10::impl::DeviceGuardImplRegistrar guard(CUDA, new Guard());

// torch made its hooks before this library was loaded, and never asks for others. They have no
// members: ours are built in their place.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* const hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

}  // namespace

extern "C" int stub_device() { return current(); }
extern "C" void stub_choose(int device, int for_all_threads) {
    chosen = static_cast<DeviceIndex>(device);
    if (for_all_threads) first = device;
}
