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

// A format under whose name an array does not travel: as integers it does.
struct Relabelled {
  DType dtype;
  nb::object integers;  // the dtype to view it as
};

// numpy has no DLPack names for the formats of ml_dtypes, and not every torch exports 8-bit floats.
std::optional<Relabelled> find_relabelled(nb::handle object) {
  std::string module;
  if (!nb::try_cast(nb::object(object.type().attr("__module__")), module)) return {};
  const bool is_numpy = module == "numpy";
  if ((!is_numpy && module != "torch") || !nb::hasattr(object, "dtype")) return {};
  std::string name = dtype_text(object);
  if (!is_numpy) name = name.substr(name.find('.') + 1);
  const auto integers = [&](const char* integer) { return nb::module_::import_(module.c_str()).attr(integer); };
  if (name == "bfloat16" && is_numpy) return Relabelled{DType::bf16, integers("uint16")};
  if (name == "float8_e4m3fn") return Relabelled{DType::f8e4m3, integers("uint8")};
  if (name == "float8_e5m2") return Relabelled{DType::f8e5m2, integers("uint8")};
  return {};
}

// What an array of uint8 may hold, if its caller says so. int8 has a name everywhere.
bool comes_as_uint8(DType dtype) { return size_bytes(dtype) == 1 && dtype != DType::i8; }

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

// `label`: the format of an array that comes as integers.
Tensor make_view(const nb::ndarray<nb::ro>& array, std::optional<DType> label, const char* argument) {
  DLTensor source{};
  source.data = array.data_handle();
  source.device = {static_cast<DLDeviceType>(array.device_type()), array.device_id()};
  source.ndim = static_cast<int32_t>(array.ndim());
  source.dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
  if (label) {
    Tensor named;
    named.dtype = *label;
    source.dtype = to_dlpack(named).dtype;
  }
  source.shape = const_cast<int64_t*>(array.shape_ptr());
  source.strides = const_cast<int64_t*>(array.stride_ptr());
  source.byte_offset = array.byte_offset();
  try {
    return from_dlpack(source);
  } catch (const Error& error) {
    const bool is_uint8 = array.dtype() == nb::dtype<uint8_t>();
    throw Error(error.code(), argument, error.argument() + " " + error.value(),
                error.allowed() +
                    (is_uint8 ? "; uint8 where the call says what 8-bit floats it holds, as KvCache's dtype" : ""));
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
nb::object exported(nb::handle object, const char* argument) {
  return is_of_gpu(object) ? export_from_gpu(object, argument) : nb::borrow(object);
}

// uint8 counts as the 8-bit float format that the caller declares.
std::optional<DType> label_of(const nb::ndarray<nb::ro>& array, const std::optional<Relabelled>& relabelled,
                              std::optional<DType> declared) {
  if (relabelled) return relabelled->dtype;
  const bool is_uint8 = array.dtype() == nb::dtype<uint8_t>();
  return is_uint8 && declared && comes_as_uint8(*declared) ? declared : std::nullopt;
}

// Memory alone doesn't say that a torch tensor wants a gradient, or is to be negated, and not every way to export one
// asks.
void check_plain(nb::handle object, const char* argument) {
  const auto is_true = [](const nb::object& value) { return value.ptr() == Py_True; };
  if (!nb::hasattr(object, "requires_grad")) return;
  if (is_true(object.attr("requires_grad"))) {
    throw Error(ErrorCode::invalid_argument, argument, "a tensor that requires a gradient",
                "x.detach(), or what is computed under torch.no_grad()");
  }
  if (nb::hasattr(object, "is_neg") && is_true(object.attr("is_neg")())) {
    throw Error(ErrorCode::invalid_argument, argument, "a tensor whose numbers are negated when they are read",
                "x.resolve_neg()");
  }
}

HeldTensor make_tensor(nb::handle object, const char* argument, Access access, std::optional<DType> declared) {
  check_plain(object, argument);
  const std::optional<Relabelled> relabelled = find_relabelled(object);
  nb::object integers = nb::borrow(object);
  if (relabelled) integers = object.attr("view")(relabelled->integers);
  const nb::object source = exported(integers, argument);
  HeldTensor tensor;
  tensor.owner = import_array(source, access);
  if (!tensor.owner.is_valid()) {
    if (access == Access::write && import_array(source, Access::read).is_valid()) {
      throw Error(ErrorCode::invalid_argument, argument, "a read-only array", "an array that may be written");
    }
    throw Error(ErrorCode::invalid_argument, argument, describe(object), kAllowed);
  }
  tensor.view = make_view(tensor.owner, label_of(tensor.owner, relabelled, declared), argument);
  if (declared && tensor.view.dtype != *declared) {
    throw Error(ErrorCode::mismatch, argument, tensor.view.describe(),
                "dtype " + std::string(to_string(*declared)) + ", as declared" +
                    (comes_as_uint8(*declared) ? ", or uint8" : ""));
  }
  return tensor;
}

}  // namespace

std::optional<DType> if_byte(DType dtype) {
  return size_bytes(dtype) == 1 ? std::optional<DType>(dtype) : std::nullopt;
}

HeldTensor read_tensor(nb::handle object, const char* argument, std::optional<DType> declared) {
  return make_tensor(object, argument, Access::read, declared);
}

HeldTensor write_tensor(nb::handle object, const char* argument, std::optional<DType> declared) {
  return make_tensor(object, argument, Access::write, declared);
}

HeldTensor write_memory(nb::handle object, const char* argument) {
  const bool is_uint8 = nb::hasattr(object, "dtype") && dtype_text(object).ends_with("uint8");
  return make_tensor(object, argument, Access::write, is_uint8 ? std::optional(DType::f8e4m3) : std::nullopt);
}

HeldTensor read_optional_tensor(nb::handle object, const char* argument) {
  return object.is_none() ? HeldTensor{} : read_tensor(object, argument);
}

HeldTensor write_optional_tensor(nb::handle object, const char* argument) {
  return object.is_none() ? HeldTensor{} : write_tensor(object, argument);
}

HeldTensor output_scale_tensor(nb::handle object) {
  HeldTensor scale = read_optional_tensor(object, "out_scale");
  return scale.view.rank == 3 ? write_tensor(object, "out_scale") : scale;
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
