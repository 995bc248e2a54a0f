// The plug-in for MPI, opened when first needed. docs/collectives.md tells users where it is looked for.
#pragma once

#include <optional>
#include <string>

#include "jit/library.hpp"
#include "parallel/mpi/table.hpp"

namespace qkv::parallel {

struct MpiPlugin {
  const MpiTable* table = nullptr;
  std::string path;
};

// `named_file` (QKV_MPI_LIBRARY): this file and no other. Otherwise in `folder` (beside the library), then by the
// loader's search. Throws unavailable: where it was looked for, what was found and not taken, and what to install.
MpiPlugin open_mpi_plugin(const std::optional<std::string>& named_file, const std::string& folder);
const MpiPlugin& mpi_plugin();

// "at /usr/lib/libqkv_mpi.so". Never throws.
jit::Probe probe_mpi();

}  // namespace qkv::parallel
