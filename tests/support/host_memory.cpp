// Accelerator for torch in host memory: torch treats its tensors as different from the CPU's, while the CPU computes. So tests
// without a GPU can check that code moves its tensors to the accelerator. It follows torch's "Facilitating New Backend Integration
// by PrivateUse1"; operations that it does not implement fall back to the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::SymIntArrayRef;
using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice{kType, 0};

// ---- Memory, streams and events: the host's, so there is no waiting.

struct HostMemory final : at::Allocator {
  static void release(void* place) { free(place); }
  at::DataPtr allocate(size_t bytes) override {
    void* place = bytes ? malloc(bytes) : nullptr;
    return {place, place, &release, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
HostMemory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};

// ---- Creating, copying and viewing tensors.

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// View of the same memory as a CPU tensor.
Tensor on_host(const Tensor& x) {
  if (x.device().is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions().dtype(x.dtype()).device(at::kCPU));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.numel()) on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar item(const Tensor& x) { return on_host(x).item(); }

const Tensor& resize_in_place(const Tensor& x, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* inside = x.unsafeGetTensorImpl();
  auto& storage = const_cast<c10::Storage&>(inside->storage());
  const size_t bytes = (c10::multiply_integers(size) + inside->storage_offset()) * inside->dtype().itemsize();
  if (bytes > storage.nbytes()) {
    auto larger = memory.allocate(bytes);
    memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  inside->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) inside->empty_tensor_restride(*format);
  return x;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_in_place(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor& set_part(Tensor& x, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* inside = x.unsafeGetTensorImpl();
  inside->set_storage_keep_dtype(std::move(storage));
  inside->set_sizes_and_strides(size, stride, offset);
  return x;
}

Tensor& set_whole(Tensor& x, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / x.dtype().itemsize());
  return set_part(x, std::move(storage), 0, {numel}, {1});
}

Tensor as_strided(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(x, size, stride, std::move(offset));
}
Tensor view(const Tensor& x, SymIntArrayRef size) { return at::cpu::view_symint(x, size); }
Tensor reshape_alias(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::cpu::_reshape_alias_symint(x, size, stride);
}
Tensor unfold(const Tensor& x, int64_t axis, int64_t size, int64_t step) { return at::cpu::unfold(x, axis, size, step); }

// ---- Convolutions, which have no fallback.

Tensor on_accelerator(const Tensor& x) { return x.defined() ? x.to(kDevice) : x; }

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  std::optional<Tensor> own_bias;
  if (bias && bias->defined()) own_bias = on_host(*bias);
  return on_accelerator(at::convolution_symint(on_host(x), on_host(weight), own_bias, stride, padding, dilation, transposed,
                                               output_padding, std::move(groups)));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight,
                                                        SymIntArrayRef stride, SymIntArrayRef padding,
                                                        SymIntArrayRef dilation, bool transposed,
                                                        SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const c10::SymInt bias_size = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  const auto found = at::convolution_backward_symint(on_host(gradient), on_host(x), on_host(weight),
                                                     SymIntArrayRef(&bias_size, 1), stride, padding, dilation, transposed,
                                                     output_padding, std::move(groups), wanted);
  return {on_accelerator(std::get<0>(found)), on_accelerator(std::get<1>(found)), on_accelerator(std::get<2>(found))};
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_in_place);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
}
