// A torch device whose memory is ordinary memory, for machines without a GPU: to see that the engine works with a
// device type other than "cpu", with autograd's thread of that device, and through torch's own streams and events.
// It takes the place of HPU, which torch's CPU builds do not have and whose tensors may become a parameter's data.
// Operations that are not below run on the CPU, on copies; nothing is asynchronous.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstring>

namespace at {
namespace {

constexpr auto kType = DeviceType::HPU;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kHeader = 64;  // before each piece of memory: its size

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> bytes{0}, bytes_peak{0};

DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }

void release(void* memory) {
  char* begin = static_cast<char*>(memory) - kHeader;
  bytes -= *reinterpret_cast<int64_t*>(begin);
  free(begin);
}

struct Memory final : Allocator {
  DataPtr allocate(size_t size) override {
    void* begin = nullptr;
    if (posix_memalign(&begin, kHeader, size + kHeader) != 0) throw std::bad_alloc();
    *static_cast<int64_t*>(begin) = static_cast<int64_t>(size);
    bytes += static_cast<int64_t>(size);
    bytes_peak = std::max(bytes_peak.load(), bytes.load());
    char* memory = static_cast<char*>(begin) + kHeader;
    memset(memory, 0xFF, size);
    return {memory, memory, &release, Device(kType, current_device)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

Memory memory_of_device;
REGISTER_ALLOCATOR(DeviceType::HPU, &memory_of_device);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kType, index_of(device)), current_stream[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kType, index_of(device)));
  }
  Stream getNewStream(Device device, int /*priority*/) const override {
    return Stream(Stream::UNSAFE, Device(kType, index_of(device)), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool /*high*/) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new char;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  return from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
}

constexpr DispatchKeySet kKeys(DispatchKey::HPU);

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return detail::empty_generic(size, &memory_of_device, kKeys, dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return detail::empty_strided_generic(size, stride, &memory_of_device, kKeys, dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool /*non_blocking*/) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    DataPtr fresh = memory_of_device.allocate(needed);
    if (storage->nbytes() != 0) memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(needed);
  }
  return self;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
Scalar item(const Tensor& self) { return on_cpu(self).item(); }
Tensor& fill(Tensor& self, const Scalar& value) {
  on_cpu(self).fill_(value);
  return self;
}
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return native::as_strided_tensorimpl(self, size, stride, offset);
}
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("fill_.Scalar", fill);
  m.impl("as_strided", as_strided);
  m.impl("view", native::view);
  m.impl("_reshape_alias", native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

}  // namespace

struct HPUHooks final : HPUHooksInterface {
  explicit HPUHooks(HPUHooksArgs) {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
};
REGISTER_HPU_HOOKS(HPUHooks)

}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("allocated", [] { return at::bytes.load(); });
  m.def("peak", [] { return at::bytes_peak.load(); });
  m.def("current_device", [] { return int(at::current_device); });
  m.def("set_device", [](int device) { at::current_device = static_cast<at::DeviceIndex>(device); });
}
