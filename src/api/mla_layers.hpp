// An MLA layer as the attention layers that it runs: over the new tokens, as a result and as a state, and over a chunk
// of context.
#pragma once

#include "qkv/layer.hpp"
#include "qkv/mla_prefill.hpp"

namespace qkv::api {

// Throws Error with all of explain()'s reasons if the layer cannot run on the device.
MlaSpec checked_layer(MlaSpec spec, Device device);

// Holds the sinks, which join once.
LayerSpec new_tokens_layer(const MlaSpec& spec);
// The same where its result is a state that a plan's chunks join: f32 for an output of 8-bit floats, which is rounded
// once.
LayerSpec new_tokens_state_layer(const MlaSpec& spec);
// States are f32: chunks are joined without rounding in between.
LayerSpec context_layer(const MlaSpec& spec);

}  // namespace qkv::api
