#include "convolution.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "refusals.h"
#include "tensors.h"

namespace simnpu {
namespace {

// The convolution's arguments in both directions, kept until it runs.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;
};

std::vector<int64_t> output_sizes(const at::Tensor& input, const at::Tensor& weight,
                                  const Geometry& g) {
  std::vector<int64_t> sizes = {
      input.size(0), g.transposed ? weight.size(1) * g.groups : weight.size(0)};
  for (size_t i = 0; i < g.stride.size(); ++i) {
    const auto dim = static_cast<int64_t>(i) + 2;
    const int64_t kernel = g.dilation[i] * (weight.size(dim) - 1) + 1;
    sizes.push_back(g.transposed ? (input.size(dim) - 1) * g.stride[i] - 2 * g.padding[i] +
                                       kernel + g.output_padding[i]
                                 : (input.size(dim) + 2 * g.padding[i] - kernel) / g.stride[i] + 1);
  }
  return sizes;
}

void enqueue(const at::Tensor& near, const char* name, std::function<void()> run) {
  auto& simulator = Simulator::get();
  Origin origin = this_line();
  Lock lock;
  simulator.enqueue(simulator.current_queue(near.device().index()),
                    {name, std::move(run), std::move(origin), nullptr});
}

at::Tensor view_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? kernel_view(*tensor) : at::Tensor();
}

}  // namespace

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  check_refused("aten::convolution", input);
  check_refused("aten::convolution", weight);
  const Geometry g{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(),
                   transposed, groups};
  auto output = make_device_tensor(output_sizes(input, weight, g), nullptr, input.scalar_type(),
                                   input.device());
  auto x = kernel_view(input), w = kernel_view(weight), y = kernel_view(output);
  auto b = view_or_undefined(bias);
  enqueue(input, "aten::convolution", [=]() mutable {
    check_alive(x, "input");
    check_alive(w, "weight");
    check_alive(b, "bias");
    const KernelScope scope;
    y.copy_(at::convolution(x, w, b, g.stride, g.padding, g.dilation, g.transposed,
                            g.output_padding, g.groups));
  });
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask) {
  check_refused("aten::convolution_backward", input);
  const Geometry g{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(),
                   transposed, groups};
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const std::vector<int64_t> sizes[3] = {input.sizes().vec(), weight.sizes().vec(), {channels}};
  at::Tensor grads[3], views[3];
  for (int i = 0; i < 3; ++i) {
    if (output_mask[i]) {
      grads[i] = make_device_tensor(sizes[i], nullptr, input.scalar_type(), input.device());
      views[i] = kernel_view(grads[i]);
    }
  }
  auto dy = kernel_view(grad_output), x = kernel_view(input), w = kernel_view(weight);
  enqueue(input, "aten::convolution_backward",
          [=, dx = views[0], dw = views[1], db = views[2]]() mutable {
    check_alive(dy, "grad_output");
    check_alive(x, "input");
    check_alive(w, "weight");
    const KernelScope scope;
    auto [grad_x, grad_w, grad_b] = at::convolution_backward(
        dy, x, w, at::IntArrayRef(&channels, 1), g.stride, g.padding, g.dilation, g.transposed,
        g.output_padding, g.groups, output_mask);
    if (dx.defined()) dx.copy_(grad_x);
    if (dw.defined()) dw.copy_(grad_w);
    if (db.defined()) db.copy_(grad_b);
  });
  return {grads[0], grads[1], grads[2]};
}

}  // namespace simnpu
