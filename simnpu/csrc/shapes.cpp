#include "shapes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "tensors.h"

namespace simnpu {
namespace {

constexpr size_t kMostAnswers = 1 << 13;
const c10::Device kMeta(c10::DeviceType::Meta);

// Maps questions to answers. All are dropped when there are too many, since a loop over growing
// shapes would fill the map.
class Answers {
 public:
  ResultShapes find(const std::string& question) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = answers_.find(question);
    return found == answers_.end() ? nullptr : found->second;
  }
  void add(const std::string& question, ResultShapes answer) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (answers_.size() >= kMostAnswers) {
      answers_.clear();
    }
    answers_.emplace(question, std::move(answer));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, ResultShapes> answers_;
};

Answers& answers() {
  static auto& answers = *new Answers;
  return answers;
}

// A question as bytes: the operator and all that the result's shape can depend on.
class Question {
 public:
  template <class T>
  void put(const T& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void put_list(at::IntArrayRef list) {
    put(list.size());
    bytes.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(int64_t));
  }
  void put_text(const std::string& text) {
    put(text.size());
    bytes += text;
  }

  void put_tensor(const at::Tensor& tensor, bool with_sizes) {
    if (!tensor.defined()) {
      put('u');
      return;
    }
    const bool is_wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    put('t');
    put(tensor.scalar_type());
    put(static_cast<char>(is_wrapped + 2 * tensor.is_cpu() + 4 * (tensor.dim() == 0)));
    if (with_sizes) {
      put_list(tensor.sizes());
      put_list(tensor.strides());
      put(tensor.storage_offset());
      put(tensor.storage().nbytes());
    }
  }

  // False for a value of an unknown kind: its answer isn't remembered.
  bool put_value(const c10::IValue& value, bool with_sizes) {
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      put('[');
      if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          put_tensor(tensor ? *tensor : at::Tensor(), with_sizes);
        }
      } else {
        for_each_tensor(value, [&](const at::Tensor& t) { put_tensor(t, with_sizes); });
      }
      return true;
    }
    return put_plain(value);
  }

  std::string bytes;

 private:
  bool put_plain(const c10::IValue& value) {
    if (value.isNone()) {
      put('n');
    } else if (value.isInt()) {
      put('i');
      put(value.toInt());
    } else if (value.isDouble()) {
      put('d');
      put(value.toDouble());
    } else if (value.isBool()) {
      put(value.toBool() ? 'T' : 'F');
    } else if (value.isString()) {
      put('s');
      put_text(value.toStringRef());
    } else if (value.isIntList()) {
      put('l');
      put_list(value.toIntVector());
    } else if (value.isDevice()) {
      put('D');
    } else if (value.isBoolList()) {
      put('b');
      for (const bool item : value.toBoolList()) {
        put(item);
      }
    } else {
      return false;
    }
    return true;
  }
};

// The result of a pointwise operator has the broadcast shape of the arguments, so only the dtype
// must be asked for. This holds for dense arguments; the strides of others are more complicated.
bool has_broadcast_shape(const OpTraits& traits, const std::vector<c10::IValue>& arguments) {
  if (!traits.is_pointwise || !traits.outs.empty() || traits.returns.size() != 1) {
    return false;
  }
  bool is_dense = true, any = false;
  for (const auto& argument : arguments) {
    if (argument.isTensorList() || argument.isOptionalTensorList()) {
      return false;
    }
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      is_dense = is_dense && (!tensor.defined() || tensor.is_contiguous());
      any = true;
    });
  }
  return is_dense && any;
}

std::vector<int64_t> broadcast_sizes(const std::vector<c10::IValue>& arguments) {
  std::vector<int64_t> sizes;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.sizes() != at::IntArrayRef(sizes)) {
        sizes = at::infer_size(sizes, tensor.sizes());
      }
    });
  }
  return sizes;
}

ResultShapes with_sizes(const ResultShape& known, std::vector<int64_t> sizes) {
  auto shape = std::make_shared<std::vector<ResultShape>>(1);
  auto& result = shape->front();
  result.dtype = known.dtype;
  result.strides.resize(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    result.strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  result.sizes = std::move(sizes);
  return shape;
}

ResultShape shape_of(const at::Tensor& meta) {
  ResultShape shape;
  shape.is_defined = meta.defined();
  if (shape.is_defined) {
    shape.dtype = meta.scalar_type();
    shape.sizes = meta.sizes().vec();
    shape.strides = meta.strides().vec();
  }
  return shape;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  // A number stays a number: type promotion treats it differently.
  const bool is_number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
  return !tensor.defined() || is_number ? tensor : meta_like(tensor);
}

ResultShapes ask_meta_kernel(const c10::OperatorHandle& op, const OpTraits& traits,
                             const std::vector<c10::IValue>& arguments) {
  const KernelScope scope;
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(map_tensors(argument, kMeta, as_meta));
  }
  std::vector<at::Tensor> outs;
  for (const size_t out : traits.outs) {
    if (stack[out].isTensor()) {
      outs.emplace_back(at::detail::empty_strided_meta({0}, {1}, stack[out].toTensor().scalar_type()));
      stack[out] = outs.back();
    }
  }
  op.callBoxed(&stack);
  auto shapes = std::make_shared<std::vector<ResultShape>>();
  for (size_t i = 0; i < traits.returns.size(); ++i) {
    if (traits.returns[i] == OpTraits::kFresh) {
      shapes->push_back(shape_of(stack[i].toTensor()));
    }
  }
  for (const auto& out : outs) {
    shapes->push_back(shape_of(out));
  }
  return shapes;
}

}  // namespace

ResultShapes infer_shapes(const c10::OperatorHandle& op, const OpTraits& traits,
                          const std::vector<c10::IValue>& arguments) {
  const bool is_broadcast = has_broadcast_shape(traits, arguments);
  Question question;
  question.put(&traits);
  question.put(is_broadcast);
  question.put(at::get_default_dtype_as_scalartype());
  bool is_known_kind = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_generator = static_cast<int>(i) == traits.generator;
    is_known_kind =
        is_known_kind && (is_generator || question.put_value(arguments[i], !is_broadcast));
  }
  try {
    ResultShapes shapes = is_known_kind ? answers().find(question.bytes) : nullptr;
    if (!shapes) {
      shapes = ask_meta_kernel(op, traits, arguments);
      if (is_known_kind) {
        answers().add(question.bytes, shapes);
      }
    }
    return is_broadcast ? with_sizes(shapes->front(), broadcast_sizes(arguments)) : shapes;
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace simnpu
