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

bool is_of_gpu(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) return false;
  try {
    int type = 0;
    const nb::object device = object.attr("__dlpack_device__")();
    return nb::try_cast(nb::object(device[0]), type) && type == kDLCUDA;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;  // no tensor, as its import is about to show
  }
}

// The capsule of a tensor on a GPU. Stream -1: the caller orders the work, by the stream of the call. Without it some
// producers make the default stream wait for theirs, which takes time and ends a graph capture.
nb::object export_from_gpu(nb::handle object, const char* argument) {
  const nb::object method = object.attr("__dlpack__");
  try {
    try {
      return method(nb::arg("stream") = -1, nb::arg("max_version") = nb::make_tuple(1, 0));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      return method(nb::arg("stream") = -1);  // a producer from before versions
    }
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw Error(ErrorCode::invalid_argument, argument,
                describe(object) + ": " + nb::cast<std::string>(nb::str(error.value())), kAllowed);
  }
}

// What nanobind imports.
nb::object exported(nb::handle object, bool is_bfloat16, const char* argument) {
  if (is_bfloat16) return object.attr("view")("uint16");
  return is_of_gpu(object) ? export_from_gpu(object, argument) : nb::borrow(object);
}

HeldTensor make_tensor(nb::handle object, const char* argument, Access access) {
  const bool is_bfloat16 = is_numpy_bfloat16(object);
  const nb::object source = exported(object, is_bfloat16, argument);
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

Stream read_stream(const StreamArgument& stream, Device device) {
  if (stream.is_none() && device.kind == DeviceKind::cpu) return {};
  const nb::object handle = nb::module_::import_("qkv.stream").attr("handle_of")(stream, device.index);
  return {reinterpret_cast<void*>(nb::cast<uintptr_t>(handle))};
}

nb::any output_or_zeros(nb::handle out, nb::handle like, std::initializer_list<int64_t> shape, DType dtype,
                        const StreamArgument& stream) {
  if (!out.is_none()) return nb::borrow<nb::any>(out);
  nb::list sizes;
  for (const int64_t size : shape) sizes.append(size);
  const std::string name(to_string(dtype));
  return nb::borrow<nb::any>(nb::module_::import_("qkv.array").attr("zeros")(like, nb::tuple(sizes), name, stream));
}

}  // namespace qkv::python
