#include "cuda/launch.hpp"

#include <fmt/format.h>

#include <vector>

#include "jit/driver.hpp"

namespace qkv::cuda {

void launch(const jit::Kernel& kernel, const LaunchShape& shape, std::initializer_list<const void*> params,
            jit::CUstream stream) {
  jit::CUlaunchConfig config{};
  config.grid_x = shape.grid_x;
  config.grid_y = shape.grid_y;
  config.grid_z = 1;
  config.block_x = shape.threads;
  config.block_y = 1;
  config.block_z = 1;
  config.dynamic_shared_bytes = shape.shared_bytes;
  config.stream = stream;
  jit::CUlaunchAttribute attributes[2]{};
  config.attributes = attributes;
  if (shape.cluster_size > 1) {
    jit::CUlaunchAttribute& cluster = attributes[config.num_attributes++];
    cluster.id = jit::CUlaunchAttributeID::cluster_dimension;
    cluster.value.cluster_dimension = {shape.cluster_size, 1, 1};
  }
  if (shape.beside_earlier) {
    jit::CUlaunchAttribute& programmatic = attributes[config.num_attributes++];
    programmatic.id = jit::CUlaunchAttributeID::programmatic_stream_serialization;
    programmatic.value.programmatic_stream_serialization = 1;
  }
  std::vector<void*> arguments;
  for (const void* param : params) arguments.push_back(const_cast<void*>(param));  // the call copies what they point at
  jit::check(
      jit::driver().launch_kernel_ex(&config, kernel.function, arguments.data(), nullptr), "cuLaunchKernelEx", [&] {
        return fmt::format("{}, grid {} x {} in clusters of {}, {} threads, {} bytes of shared memory", kernel.name,
                           shape.grid_x, shape.grid_y, shape.cluster_size, shape.threads, shape.shared_bytes);
      });
}

}  // namespace qkv::cuda
