#include "tensor_argument.hpp"

#include <nanobind/stl/string.h>

#include <string>

#include "qkv/dlpack.hpp"
#include "qkv/status.hpp"

namespace qkv::python {
namespace {

constexpr const char* kAllowed =
    "a tensor: a numpy array, a torch tensor that needs no gradient, or an object with __dlpack__";

enum class Access { read, write };

std::string dtype_text(nb::handle object) {
  const nb::object dtype = object.attr("dtype");
  return nb::str(nb::handle(dtype)).c_str();
}

// numpy has no DLPack name for the bfloat16 of ml_dtypes.
bool is_numpy_bfloat16(nb::handle object) {
  const std::string module = nb::cast<std::string>(object.type().attr("__module__"));
  if (module != "numpy" || !nb::hasattr(object, "dtype")) return false;
  return dtype_text(object) == "bfloat16";
}

// Not valid if the object is no tensor, or cannot be had with this access.
nb::ndarray<nb::ro> import_array(nb::handle object, Access access) {
  nb::ndarray<nb::ro> array;
  if (access == Access::read) {
    nb::try_cast<nb::ndarray<nb::ro>>(object, array, false);
  } else if (nb::ndarray<> writable; nb::try_cast<nb::ndarray<>>(object, writable, false)) {
    array = nb::ndarray<nb::ro>(writable);
  }
  return array;
}

std::string describe(nb::handle object) {
  if (object.is_none()) return "None";
  std::string text = "an object of type " + nb::cast<std::string>(object.type().attr("__name__"));
  if (nb::hasattr(object, "dtype")) text += " with dtype " + dtype_text(object);
  return text;
}

Tensor make_view(const nb::ndarray<nb::ro>& array, bool is_bfloat16, const char* argument) {
  DLTensor source{};
  source.data = array.data_handle();
  source.device = {static_cast<DLDeviceType>(array.device_type()), array.device_id()};
  source.ndim = static_cast<int32_t>(array.ndim());
  source.dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
  if (is_bfloat16) source.dtype = {kDLBfloat, 16, 1};
  source.shape = const_cast<int64_t*>(array.shape_ptr());
  source.strides = const_cast<int64_t*>(array.stride_ptr());
  source.byte_offset = array.byte_offset();
  try {
    return from_dlpack(source);
  } catch (const Error& error) {
    throw Error(error.code(), argument, error.argument() + " " + error.value(), error.allowed());
  }
}

HeldTensor make_tensor(nb::handle object, const char* argument, Access access) {
  const bool is_bfloat16 = is_numpy_bfloat16(object);
  const nb::object source = is_bfloat16 ? nb::object(object.attr("view")("uint16")) : nb::borrow(object);
  HeldTensor tensor;
  tensor.owner = import_array(source, access);
  if (!tensor.owner.is_valid()) {
    if (access == Access::write && import_array(source, Access::read).is_valid()) {
      throw Error(ErrorCode::invalid_argument, argument, "a read-only array", "an array that may be written");
    }
    throw Error(ErrorCode::invalid_argument, argument, describe(object), kAllowed);
  }
  tensor.view = make_view(tensor.owner, is_bfloat16, argument);
  return tensor;
}

}  // namespace

HeldTensor read_tensor(nb::handle object, const char* argument) { return make_tensor(object, argument, Access::read); }

HeldTensor write_tensor(nb::handle object, const char* argument) {
  return make_tensor(object, argument, Access::write);
}

HeldTensor read_optional_tensor(nb::handle object, const char* argument) {
  return object.is_none() ? HeldTensor{} : read_tensor(object, argument);
}

HeldTensor write_optional_tensor(nb::handle object, const char* argument) {
  return object.is_none() ? HeldTensor{} : write_tensor(object, argument);
}

nb::any output_or_zeros(nb::handle out, nb::handle like, std::initializer_list<int64_t> shape, DType dtype) {
  if (!out.is_none()) return nb::borrow<nb::any>(out);
  nb::list sizes;
  for (const int64_t size : shape) sizes.append(size);
  const std::string name(to_string(dtype));
  return nb::borrow<nb::any>(nb::module_::import_("qkv.array").attr("zeros")(like, nb::tuple(sizes), name));
}

}  // namespace qkv::python
