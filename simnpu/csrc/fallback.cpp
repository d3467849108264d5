#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "operators.h"
#include "refusals.h"
#include "shapes.h"
#include "tensors.h"

namespace simnpu {
namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::Device kHost(c10::DeviceType::CPU);

// One call of an operator on device tensors.
struct Call {
  c10::OperatorHandle op;
  const OpTraits& traits;
  std::vector<IValue> arguments;
  c10::Device device{kDevice, 0};
};

// All tensors must be on one device. Numbers (0-d host tensors) may join, as on real accelerators.
void check_devices(Call& call) {
  c10::DeviceIndex index = -1;
  const at::Tensor* host = nullptr;
  auto look = [&](const at::Tensor& tensor) {
    if (is_on_device(tensor)) {
      TORCH_CHECK(index < 0 || index == tensor.device().index(), "simnpu: ", call.traits.name,
                  ": expected all tensors to be on the same device, but found ",
                  c10::Device(kDevice, index), " and ", tensor.device());
      index = tensor.device().index();
    } else if (tensor.defined() && tensor.dim() > 0) {
      host = &tensor;
    }
    check_refused(call.traits.name, tensor);
  };
  for (const auto& argument : call.arguments) {
    for_each_tensor(argument, look);
    if (argument.isDevice() && argument.toDevice().type() == kDevice && index < 0) {
      index = argument.toDevice().index();
    }
  }
  call.device = {kDevice, index >= 0 ? index : current_device()};
  TORCH_CHECK(host == nullptr || call.traits.takes_host_tensors, "simnpu: ", call.traits.name,
              ": expected all tensors to be on the same device, but found ", call.device,
              " and cpu");
}

at::Tensor resized(const at::Tensor& out, at::IntArrayRef sizes) {
  if (out.sizes() != sizes) {
    out.resize_(sizes);
  }
  return out;
}

// The value that a closure may keep: device tensors by their kernel view, host tensors as they are
// at the call. Nobody else has the numbers that torch wrapped, so they are kept without a copy.
at::Tensor kept(const at::Tensor& tensor) {
  if (!tensor.defined() || is_on_device(tensor)) {
    return tensor.defined() ? kernel_view(tensor) : tensor;
  }
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

// Random numbers come from the CPU's generator in the order of the calls, not in the order in which
// operations run: each call draws a seed. So all schedules give the same numbers.
std::optional<uint64_t> draw_seed(const Call& call) {
  if (!call.traits.is_random) {
    return std::nullopt;
  }
  std::optional<at::Generator> given;
  if (call.traits.generator >= 0) {
    given = call.arguments[call.traits.generator].toOptional<at::Generator>();
  }
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      given, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> guard(generator->mutex_);
  return generator->random64();
}

// Seeds the default generator for operators that have no generator argument.
class SeededDefault {
 public:
  explicit SeededDefault(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> guard(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~SeededDefault() {
    std::lock_guard<std::mutex> guard(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

struct Result {
  size_t position;
  at::Tensor target;
};

// A kernel in a stream's queue.
struct Kernel {
  c10::OperatorHandle op;
  const OpTraits& traits;
  Stack arguments;
  std::vector<Result> results;
  std::optional<uint64_t> seed;
  Origin origin;

  void run() {
    try {
      check();
      const KernelScope scope;
      std::optional<SeededDefault> seeded;
      if (seed && traits.generator < 0) {
        seeded.emplace(*seed);
      }
      Stack stack = arguments;  // keeps the arguments, to name the tensors of a failure
      op.callBoxed(&stack);
      for (auto& result : results) {
        store(stack[result.position].toTensor(), result.target);
      }
    } catch (const c10::Error& error) {
      report(error.what_without_backtrace());
    } catch (const std::exception& error) {
      report(error.what());
    }
  }

 private:
  void check() const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        check_alive(tensor, traits.arguments[i].c_str());
      });
    }
  }

  void store(const at::Tensor& made, at::Tensor& target) const {
    TORCH_CHECK(made.sizes() == target.sizes(), "torch's Meta kernel announced the shape ",
                target.sizes(), ", its CPU kernel gave ", made.sizes());
    target.copy_(made);
  }

  void report(const std::string& reason) const {
    std::string message = "simnpu: " + traits.name + " failed: " + reason;
    for (size_t i = 0; i < arguments.size(); ++i) {
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          message += "\n  " + describe(tensor, traits.arguments[i].c_str());
        }
      });
    }
    Simulator::get().report(message + issued_at(origin));
  }
};

// The results in the schema's order: new tensors from `fresh`; the others are arguments.
std::vector<IValue> in_order(const Call& call, const std::vector<IValue>& fresh) {
  std::vector<IValue> ordered;
  size_t next = 0;
  for (const int position : call.traits.returns) {
    ordered.push_back(position == OpTraits::kFresh ? fresh[next++] : call.arguments[position]);
  }
  return ordered;
}

std::vector<IValue> run_queued(const Call& call, const std::vector<ResultShape>& shapes) {
  auto kernel = std::make_shared<Kernel>(
      Kernel{call.op, call.traits, {}, {}, draw_seed(call), this_line()});
  std::vector<IValue> fresh;
  size_t next = 0;
  for (size_t i = 0; i < call.traits.returns.size(); ++i) {
    if (call.traits.returns[i] != OpTraits::kFresh) {
      continue;
    }
    const auto& shape = shapes[next++];
    at::Tensor made;
    if (shape.is_defined) {
      const at::IntArrayRef strides = shape.strides;
      made = make_device_tensor(shape.sizes, &strides, shape.dtype, call.device);
      kernel->results.push_back({i, kernel_view(made)});
    }
    fresh.emplace_back(made);
  }
  for (const size_t out : call.traits.outs) {
    if (call.arguments[out].isTensor()) {
      resized(call.arguments[out].toTensor(), shapes[next++].sizes);
    }
  }
  {
    const KernelScope scope;
    for (const auto& argument : call.arguments) {
      kernel->arguments.push_back(map_tensors(argument, kHost, kept));
    }
  }
  if (kernel->seed && call.traits.generator >= 0) {
    kernel->arguments[call.traits.generator] = at::detail::createCPUGenerator(*kernel->seed);
  }
  auto& simulator = Simulator::get();
  Lock lock;
  ++simulator.counts.queued_kernels;
  simulator.enqueue(simulator.current_queue(call.device.index()),
                    {call.traits.name.c_str(), [kernel] { kernel->run(); }, kernel->origin, nullptr});
  return in_order(call, fresh);
}

// Results whose shape depends on data: waits for the stream and runs at once.
std::vector<IValue> run_now(const Call& call) {
  auto& simulator = Simulator::get();
  const auto as_kernel_sees = [](const at::Tensor& tensor) {
    return is_on_device(tensor) ? kernel_view(tensor) : tensor;
  };
  const auto to_device = [&call](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == at::kStrided, "simnpu: ", call.traits.name, " gives a tensor of ",
                "layout ", tensor.layout(), ", and this device has strided tensors only");
    const at::IntArrayRef strides = tensor.strides();
    auto made = make_device_tensor(tensor.sizes(), &strides, tensor.scalar_type(), call.device);
    kernel_view(made).copy_(tensor);
    return made;
  };
  Stack stack;
  Lock lock;
  ++simulator.counts.blocking_kernels;
  ++simulator.counts.blocking_names[call.traits.name];
  simulator.synchronize(simulator.current_queue(call.device.index()));
  const KernelScope scope;
  for (const auto& argument : call.arguments) {
    stack.push_back(map_tensors(argument, kHost, as_kernel_sees));
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (const size_t out : call.traits.outs) {
    if (stack[out].isTensor()) {
      const auto& target = call.arguments[out].toTensor();
      outs.emplace_back(target, at::empty({0}, at::TensorOptions().dtype(target.scalar_type())));
      stack[out] = outs.back().second;
    }
  }
  call.op.callBoxed(&stack);
  for (auto& [target, made] : outs) {
    resized(target, made.sizes());
    simulator.drain(simulator.current_queue(call.device.index()));  // resizing queues a copy
    kernel_view(target).copy_(made);
  }
  std::vector<IValue> fresh;
  for (size_t i = 0; i < call.traits.returns.size(); ++i) {
    if (call.traits.returns[i] == OpTraits::kFresh) {
      fresh.push_back(map_tensors(stack[i], call.device, to_device));
    }
  }
  return in_order(call, fresh);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Simulator::get().check_usable();
  const auto& traits = traits_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(!traits.is_view, "simnpu: the view operator ", traits.name,
                              " isn't implemented");
  TORCH_CHECK_NOT_IMPLEMENTED(traits.refusal == nullptr, "simnpu: ", traits.name,
                              " isn't supported: ", traits.refusal);
  const size_t count = traits.arguments.size();
  Call call{op, traits, {stack->end() - static_cast<ptrdiff_t>(count), stack->end()}};
  check_devices(call);
  const bool needs_shapes = traits.has_fresh || !traits.outs.empty();
  static const auto no_shapes = std::make_shared<const std::vector<ResultShape>>();
  ResultShapes shapes;
  if (!traits.returns_values && !traits.depends_on_data) {
    shapes = needs_shapes ? infer_shapes(op, traits, call.arguments) : no_shapes;
  }
  auto results = shapes ? run_queued(call, *shapes) : run_now(call);
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
}

// Without this function, torch's error would list all its backends.
void refuse_autocast(const c10::OperatorHandle& op, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "simnpu: ", c10::toString(op.schema().operator_name()),
                              " under autocast isn't supported on this device: convert the ",
                              "tensors and leave autocast out");
}

void refuse_layout(const c10::OperatorHandle& op, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "simnpu: ", c10::toString(op.schema().operator_name()),
                              " isn't supported on sparse, quantized or nested tensors of this ",
                              "device: it has strided tensors only");
}

void register_boxed(c10::DispatchKey key, torch::CppFunction function) {
  // Never removed, as in factories.cpp.
  auto& library = *new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library.fallback(std::move(function));
}

}  // namespace

void register_fallback() {
  using c10::DispatchKey;
  // torch makes these from other operators on any device. Those round differently and wait, since
  // native_batch_norm is among them.
  auto& direct = *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1,
                                     __FILE__, __LINE__);
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    direct.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  register_boxed(DispatchKey::PrivateUse1,
                 torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto key : {DispatchKey::SparsePrivateUse1, DispatchKey::SparseCsrPrivateUse1,
                         DispatchKey::QuantizedPrivateUse1, DispatchKey::NestedTensorPrivateUse1}) {
    register_boxed(key, torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
  }
  register_boxed(DispatchKey::AutocastPrivateUse1,
                 torch::CppFunction::makeFromBoxedFunction<&refuse_autocast>());
}

}  // namespace simnpu
