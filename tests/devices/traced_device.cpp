// A device of torch (PrivateUse1) in the memory of the host. Every operation runs on the CPU at once,
// and is noted as a kernel of the current stream that reads and writes the memory of its tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

#include "stream_clock.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const Device DEVICE(KIND, 0);

Stream as_stream(int64_t id) { return Stream(Stream::UNSAFE, DEVICE, id); }

stream_clock::Event& as_event(void* event) { return *static_cast<stream_clock::Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return as_stream(stream_clock::current_stream()); }
  Stream getDefaultStream(Device) const override { return as_stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return as_stream(stream_clock::new_stream()); }
  Stream getNewStream(Device, int) const override { return as_stream(stream_clock::new_stream()); }
  Stream exchangeStream(Stream stream) const override {
    return as_stream(stream_clock::exchange_stream(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    stream_clock::Event event;
    stream_clock::record(event, stream.id());
    return stream_clock::is_known_to_host(event);
  }
  void synchronizeStream(const Stream& stream) const override { stream_clock::synchronize_stream(stream.id()); }
  void synchronizeDevice(DeviceIndex) const override { stream_clock::synchronize_device(); }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new stream_clock::Event;
    stream_clock::record(as_event(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override { stream_clock::block(as_event(event), stream.id()); }
  // As late as possible: an event has passed when the host has waited for it.
  bool queryEvent(void* event) const override { return !event || stream_clock::is_known_to_host(as_event(event)); }
  void synchronizeEvent(void* event) const override { stream_clock::synchronize(as_event(event)); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<stream_clock::Event*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return as_event(second).time - as_event(first).time;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    stream_clock::used_on(data.get(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void release(void* memory) {
  stream_clock::freed(memory);
  std::free(memory);
}

struct Memory final : c10::Allocator {
  explicit Memory(Device device) : device(device) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    stream_clock::allocated(memory, (bytes / 64 + 1) * 64, device.type() == KIND);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  Device device;
};
Memory device_memory(DEVICE), pinned_memory(c10::kCPU);
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto memory = device_memory.allocate(bytes);
  if (const auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return stream_clock::is_tracked_host_memory(pointer); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Operations

size_t extent(const at::Tensor& tensor) {
  return tensor.numel() ? at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()) : 0;
}

void access(const at::Tensor& tensor, bool writes) {
  if (tensor.defined() && tensor.numel()) stream_clock::access(tensor.const_data_ptr(), extent(tensor), writes);
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_device(const at::Tensor& result, const std::vector<at::Tensor>& inputs, const std::string& name) {
  if (!result.defined()) return result;
  for (const auto& input : inputs)
    TORCH_CHECK(!result.numel() || result.const_data_ptr() != input.const_data_ptr(), name, " returns a view");
  auto fresh = at::empty_strided(result.sizes(), result.strides(), result.options().device(DEVICE));
  if (auto bytes = extent(result)) std::memcpy(fresh.mutable_data_ptr(), result.const_data_ptr(), bytes);
  access(fresh, true);
  return fresh;
}

// An operation has resized its empty output.
void keep_resized(const at::Tensor& output, const at::Tensor& result) {
  if (output.numel() || output.sizes() == result.sizes()) return;
  output.resize_(result.sizes());
  if (!result.numel()) return;
  on_cpu(output).copy_(result);
  access(output, true);
}

// Any operation: its tensors are the CPU's for a moment.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto first = stack->size() - schema.arguments().size();
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::vector<at::Tensor> inputs;
  stream_clock::launch(name);
  auto take = [&](const at::Tensor& tensor, bool writes) {
    access(tensor, writes);
    if (tensor.defined()) inputs.push_back(tensor);
    return on_cpu(tensor);
  };
  for (size_t number = 0; number < given.size(); ++number) {
    const auto* alias = schema.arguments()[number].alias_info();
    const bool writes = alias && alias->isWrite();
    auto& value = (*stack)[first + number];
    if (value.isTensor()) {
      value = take(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional(take(*tensor, writes)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto results = stack->size() - schema.returns().size();
  for (size_t number = 0; number < schema.returns().size(); ++number) {
    auto& value = (*stack)[results + number];
    const auto* alias = schema.returns()[number].alias_info();
    if (alias && alias->isWrite()) {  // one of the arguments
      for (size_t argument = 0; argument < given.size(); ++argument) {
        const auto* other = schema.arguments()[argument].alias_info();
        if (!other || !(*other == *alias)) continue;
        if (value.isTensor()) keep_resized(given[argument].toTensor(), value.toTensor());
        value = given[argument];
      }
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), inputs, name);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, inputs, name));
      value = list;
    }
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  stream_clock::launch("copy");
  const bool leaves = to.device().type() != KIND, arrives = from.device().type() != KIND;
  const auto& host = leaves ? to : from;
  // With page-locked memory the copy may run behind the host; otherwise the driver reads the memory
  // before it returns, and has written it when it returns.
  const bool behind = non_blocking && host.numel() && stream_clock::is_tracked_host_memory(host.const_data_ptr());
  access(from, false);
  access(to, true);
  on_cpu(to).copy_(on_cpu(from));
  if ((leaves || arrives) && !behind && (leaves || !non_blocking))
    stream_clock::synchronize_stream(stream_clock::current_stream());
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  stream_clock::launch("item");
  access(tensor, false);
  stream_clock::synchronize_stream(stream_clock::current_stream());
  return at::cpu::_local_scalar_dense(on_cpu(tensor));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (const auto bytes = extent(self); bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::cpu::set_(self, storage, 0, {length}, {1});
}

void record_stream(at::Tensor& self, Stream stream) {
  stream_clock::used_on(self.storage().data_ptr().get(), stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::cpu::as_strided);  // views do nothing on the device
  library.impl("view", &at::cpu::view);
  library.impl("_reshape_alias", &at::cpu::_reshape_alias);
  library.impl("unfold", &at::cpu::unfold);
}
