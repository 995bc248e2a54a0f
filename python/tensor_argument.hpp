// Python arrays as qkv::Tensor, without copies: numpy arrays (the float formats of ml_dtypes included), torch tensors,
// and whatever else has __dlpack__. What is refused is refused by the argument's name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "qkv/device.hpp"
#include "qkv/tensor.hpp"

namespace qkv::python {

namespace nb = nanobind;

// Takes any object, so that it is the conversion below that refuses it, and not the overload resolution, which
// could not name the argument.
class ArrayArgument : public nb::object {
  static bool accept_any(nb::handle) { return true; }

 public:
  NB_OBJECT_DEFAULT(ArrayArgument, nb::object, "Array", accept_any)
};

// A stream of any kind that stream.py knows, or None.
class StreamArgument : public nb::object {
  static bool accept_any(nb::handle) { return true; }

 public:
  NB_OBJECT_DEFAULT(StreamArgument, nb::object, "Stream", accept_any)
};

// None on a GPU is torch's current stream there; CPUs have none, but what is no stream is refused all the same.
Stream read_stream(const StreamArgument& stream, Device device);

// A view and what keeps its memory alive. Lives through the call, or as long as the object that stores it.
struct HeldTensor {
  Tensor view;
  nb::ndarray<nb::ro> owner;
};

// What uint8 stands for where such a dtype is wanted.
std::optional<DType> if_byte(DType dtype);

// For tensors that a call only reads: read-only arrays are welcome. `declared`: what uint8 stands for, if it is 8-bit
// floats; an array of another dtype than the declared one is refused.
HeldTensor read_tensor(nb::handle object, const char* argument, std::optional<DType> declared = {});
// For tensors that a call writes.
HeldTensor write_tensor(nb::handle object, const char* argument, std::optional<DType> declared = {});
// For scratch memory, whatever its dtype.
HeldTensor write_memory(nb::handle object, const char* argument);
// None gives the default-constructed Tensor: not given.
HeldTensor read_optional_tensor(nb::handle object, const char* argument);
HeldTensor write_optional_tensor(nb::handle object, const char* argument);
// An out_scale, or None: given ones are read, those of groups are written.
HeldTensor output_scale_tensor(nb::handle object);

// `out` itself, or, for None, a new array of zeros of the kind that `like` is (numpy for numpy, torch for torch),
// written on the stream of the call that fills it.
nb::any output_or_zeros(nb::handle out, nb::handle like, std::initializer_list<int64_t> shape, DType dtype,
                        const StreamArgument& stream);

}  // namespace qkv::python
