// Operations of the simulated device.
//
// An operation without a kernel of its own comes to `run_on_stream`, torch's boxed fall-back. That finds out what the
// operation returns, allocates it, and queues the CPU kernel on the current stream. The kernel gets CPU tensors that lie
// on the bytes of the device tensors. An operation whose results depend on values, such as `nonzero`, makes the host
// wait, as on CUDA.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A CPU tensor on the bytes of a device tensor. Only tasks of a stream may look into it.
Tensor on_bytes(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto* bytes = readable(tensor.const_data_ptr());
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), [](void*) {}, options, at::Device(at::kCPU));
}

// --- memory ----------------------------------------------------------------------------------------------------------

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_generic(size, device_allocator(), keys(), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys(), c10::dtype_or_default(dtype));
}

void reserve(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() > 0 && bytes > impl->unsafe_storage().nbytes()) {
    resize_storage(impl->unsafe_storage(), bytes);
  }
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  reserve(self);
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  reserve(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto* allocator = device_allocator();
  return set_storage(
      self, at::Storage(at::Storage::use_byte_size_t(), 0, allocator->allocate(0), allocator, true), 0, {0}, {});
}

void record_stream(Tensor& self, at::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

// --- copies ----------------------------------------------------------------------------------------------------------

void copy_between_devices(const Tensor& source, const Tensor& target) {
  auto sending = current_stream(source.device().index());
  auto receiving = current_stream(target.device().index());
  wait_on_stream(sending, record(receiving)); // until the target's memory is free to be written
  enqueue(sending, [from = on_bytes(source), to = on_bytes(target)] { to.copy_(from); });
  wait_on_stream(receiving, record(sending));
}

// `tensor.copy_(source)`. Runs on the current stream of the device, behind the host if that may be.
Tensor copy_from(const Tensor& source_, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  auto source = source_.expand_as(target);
  if (is_ours(source) && is_ours(target) && source.device() != target.device()) {
    copy_between_devices(source, target);
    return target;
  }
  const auto& here = is_ours(target) ? target : source;
  const auto& other = is_ours(target) ? source : target;
  int device = here.device().index();
  auto stream = current_stream(device);
  if (is_ours(other)) {
    enqueue(stream, [from = on_bytes(source), to = on_bytes(target)] { to.copy_(from); });
    return target;
  }
  bool to_host = !is_ours(target);
  (to_host ? counters(device).bytes_to_host : counters(device).bytes_from_host) += static_cast<int64_t>(target.nbytes());
  auto pinned = pinned_memory(other.const_data_ptr());
  bool behind = non_blocking && pinned != nullptr;
  // The task must not hold `other` itself: freeing a tensor that Python knows needs Python's lock.
  auto options = at::TensorOptions().dtype(other.dtype()).device(at::kCPU);
  auto on_host = at::from_blob(
      const_cast<void*>(other.const_data_ptr()), other.sizes(), other.strides(), [pinned](void*) {}, options,
      at::Device(at::kCPU));
  auto from = to_host ? on_bytes(source) : on_host;
  auto to = to_host ? on_host : on_bytes(target);
  if (source.is_conj() != target.is_conj() || source.is_neg() != target.is_neg()) {
    TORCH_CHECK(false, "sim: conjugated and negated views cannot be copied between device and host");
  }
  enqueue(stream, [from, to] { to.copy_(from); });
  if (!behind) {
    synchronize(stream);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return target.copy_(source);
}

at::Scalar read_scalar(const Tensor& self) {
  synchronize(current_stream(self.device().index()));
  return on_bytes(self).item();
}

// --- all other operations --------------------------------------------------------------------------------------------

struct Kernels {
  std::mutex mutex;
  std::map<std::string, int64_t> calls;
};

Kernels& kernels() {
  static auto* all = new Kernels();
  return *all;
}

void note(const std::string& name) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  ++kernels().calls[name.substr(name.find("::") + 2)];
}

template <typename Function>
IValue map_tensors(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(function(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor.has_value() ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

Tensor keep_wrapped(const Tensor& tensor, Tensor replacement) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) { // it counts less in type promotion
    replacement.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return replacement;
}

Tensor like_on_meta(const Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return keep_wrapped(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
}

// One call of an operation: its arguments as the CPU kernel gets them.
struct Call {
  const c10::OperatorHandle op;
  int device = -1;
  Stack given;
  Stack on_cpu;
  bool has_empty_output = false;
  bool only_writes = true; // whether it returns nothing but arguments

  Call(const c10::OperatorHandle& op, Stack arguments) : op(op), given(std::move(arguments)) {
    for (const auto& value : given) {
      find_device(value);
    }
    TORCH_CHECK(device >= 0, "sim: ", op.schema().name(), " has no tensor of this device");
    std::map<c10::TensorImpl*, Tensor> known; // a tensor that is given twice stays one
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& value = given[i];
      if (declared[i].name() == "generator") {
        on_cpu.emplace_back(draw(value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator()), device));
      } else if (value.isDevice()) {
        on_cpu.emplace_back(at::Device(at::kCPU));
      } else {
        on_cpu.push_back(map_tensors(value, [&](const Tensor& tensor) { return on_host(tensor, known); }));
      }
      bool is_output = declared[i].is_out() && value.isTensor();
      has_empty_output = has_empty_output || (is_output && value.toTensor().numel() == 0);
    }
    for (const auto& returned : op.schema().returns()) {
      only_writes = only_writes && returned.alias_info() != nullptr && returned.alias_info()->isWrite();
    }
  }

  void find_device(const IValue& value) {
    if (value.isDevice() && value.toDevice().type() == kSim && device < 0) {
      device = value.toDevice().has_index() ? value.toDevice().index() : c10::impl::getDeviceGuardImpl(kSim)->getDevice().index();
    }
    map_tensors(value, [&](const Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(), "Expected all tensors to be on the same device, but ",
            op.schema().name(), " got tensors of sim:", device, " and ", tensor.device());
        device = tensor.device().index();
      }
      return tensor;
    });
  }

  static Tensor on_host(const Tensor& tensor, std::map<c10::TensorImpl*, Tensor>& known) {
    if (!tensor.defined()) {
      return tensor;
    }
    auto& made = known[tensor.unsafeGetTensorImpl()];
    if (!made.defined()) {
      made = is_ours(tensor) ? on_bytes(tensor) : keep_wrapped(tensor, tensor.clone());
    }
    return made;
  }

  // What the operation returns, as tensors without values. False if it cannot be told before it has run.
  bool predict(Stack& results) const {
    for (const auto& value : on_cpu) {
      results.push_back(value.isDevice() ? IValue(at::Device(at::kMeta)) : map_tensors(value, like_on_meta));
    }
    try {
      op.callBoxed(&results);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  static void run(const c10::OperatorHandle& op, Stack& stack) {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  void run_later() const {
    enqueue(current_stream(device), [op = op, stack = on_cpu]() mutable { run(op, stack); });
  }

  // Allocate the results, run the kernel behind the host, and copy what it returns into them.
  Stack run_later_into(const Stack& predicted) const {
    Stack results;
    std::vector<Tensor> targets;
    for (const auto& value : predicted) {
      results.push_back(map_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) {
          targets.emplace_back();
          return tensor;
        }
        auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::Device(kSim, device));
        auto result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        targets.push_back(on_bytes(result));
        return result;
      }));
    }
    enqueue(current_stream(device), [op = op, stack = on_cpu, targets]() mutable {
      run(op, stack);
      fill(targets, stack);
    });
    return results;
  }

  static void fill(const std::vector<Tensor>& targets, const Stack& values) {
    size_t i = 0;
    for (const auto& value : values) {
      map_tensors(value, [&](const Tensor& tensor) {
        const auto& target = targets.at(i++);
        if (target.defined() && target.numel() > 0) {
          target.copy_(tensor);
        }
        return tensor;
      });
    }
  }

  // Wait for the stream, run the kernel now, and return its results on the device.
  Stack run_now() const {
    synchronize(current_stream(device));
    Stack stack = on_cpu;
    run(op, stack);
    Stack results;
    for (const auto& value : stack) {
      results.push_back(map_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) {
          return tensor;
        }
        auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::Device(kSim, device));
        auto result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        if (result.numel() > 0) {
          enqueue(current_stream(device), [from = tensor.clone(), to = on_bytes(result)] { to.copy_(from); });
        }
        return result;
      }));
    }
    return results;
  }

  // Run now, with outputs that have no size yet.
  void run_now_into_outputs() {
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < given.size(); ++i) {
      if (declared[i].is_out() && given[i].isTensor()) {
        on_cpu[i] = at::empty({0}, at::TensorOptions().dtype(given[i].toTensor().dtype()).device(at::kCPU));
      }
    }
    synchronize(current_stream(device));
    Stack stack = on_cpu;
    run(op, stack);
    for (size_t i = 0; i < given.size(); ++i) {
      if (declared[i].is_out() && given[i].isTensor()) {
        given[i].toTensor().resize_(on_cpu[i].toTensor().sizes());
        given[i].toTensor().copy_(on_cpu[i].toTensor());
      }
    }
  }

  // The arguments that the operation returns.
  Stack written() const {
    Stack results;
    for (const auto& returned : op.schema().returns()) {
      const auto& names = returned.alias_info()->beforeSets();
      for (size_t i = 0; i < given.size(); ++i) {
        const auto* alias = op.schema().arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && alias->beforeSets() == names) {
          results.push_back(given[i]);
          break;
        }
      }
    }
    return results;
  }
};

void run_on_stream(const c10::OperatorHandle& op, Stack* stack) {
  auto count = op.schema().arguments().size();
  Call call(op, Stack(stack->end() - count, stack->end()));
  c10::DeviceGuard guard(at::Device(kSim, call.device));
  note(op.schema().name());
  Stack results;
  Stack predicted;
  if (call.only_writes && call.has_empty_output) {
    call.run_now_into_outputs();
    results = call.written();
  } else if (call.only_writes) {
    call.run_later();
    results = call.written();
  } else if (call.predict(predicted)) {
    results = call.run_later_into(predicted);
  } else {
    results = call.run_now();
  }
  stack->erase(stack->end() - count, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

// --- operations with kernels of their own ----------------------------------------------------------------------------

// torch would compose it of others on this device. It is one kernel, as on CUDA.
std::tuple<Tensor, Tensor, Tensor> native_layer_norm(
    const Tensor& input, at::IntArrayRef shape, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    double eps) {
  note("aten::native_layer_norm");
  c10::DeviceGuard guard(input.device());
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.size()), sizes.end(), 1);
  bool is_mixed = weight.has_value() && weight->defined() && weight->scalar_type() != input.scalar_type();
  auto wide = input.options().dtype(is_mixed ? weight->scalar_type() : input.scalar_type());
  auto result = at::empty(input.sizes(), input.options());
  auto mean = at::empty(sizes, wide);
  auto rstd = at::empty(sizes, wide);
  auto lies = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional<Tensor>(on_bytes(*tensor)) : std::nullopt;
  };
  if (result.numel() > 0) {
    enqueue(
        current_stream(input.device().index()),
        [from = on_bytes(input), shape = shape.vec(), weight = lies(weight), bias = lies(bias), eps,
         to = on_bytes(result), to_mean = on_bytes(mean), to_rstd = on_bytes(rstd)] {
          auto results = at::native_layer_norm(from, shape, weight, bias, eps);
          to.copy_(std::get<0>(results));
          to_mean.copy_(std::get<1>(results));
          to_rstd.copy_(std::get<2>(results));
        });
  }
  return {result, mean, rstd};
}

// As CUDA's kernels, both directions round once: float32(x) * mask * float32(1 / (1 - p)). There are devices whose
// backward rounds the scale first, and a test can ask for that.
Tensor masked_product(const Tensor& values, const Tensor& mask, double scale, bool rounds_scale) {
  auto result = at::empty_like(values);
  auto wide = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto from = on_bytes(values);
  auto ones = on_bytes(mask);
  auto to = on_bytes(result);
  if (result.numel() > 0) {
    enqueue(current_stream(values.device().index()), [=] {
      if (rounds_scale) {
        to.copy_(from * (ones.to(from.scalar_type()) * scale));
      } else {
        to.copy_(from.to(wide) * ones * scale);
      }
    });
  }
  return result;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  note("aten::native_dropout");
  c10::DeviceGuard guard(input.device());
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), mask.fill_(true)};
  }
  mask.bernoulli_(1 - p);
  return {masked_product(input, mask, p == 1 ? 0 : 1 / (1 - p), false), mask};
}

Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  note("aten::native_dropout_backward");
  c10::DeviceGuard guard(gradient.device());
  return masked_product(gradient, mask, scale, settings().dropout_rounds_alike == 0);
}

c10::Dict<std::string, int64_t> count_kernels() {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, calls] : kernels().calls) {
    counts.insert(name, calls);
  }
  return counts;
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("native_layer_norm", native_layer_norm);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
}

TORCH_LIBRARY_FRAGMENT(sim, m) {
  m.def("count_kernels() -> Dict(str, int)", count_kernels);
}

} // namespace sim
