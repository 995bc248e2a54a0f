// A mask compiled for engines: a flat list of instructions, evaluated a row of keys at a time, and classified a tile
// at a time. is_visible (the recursive definition) is what both must equal.
#pragma once

#include <cstdint>
#include <vector>

#include "core/index/shown_keys.hpp"
#include "qkv/mask.hpp"

namespace qkv::mask {

enum class Opcode : uint8_t {
  constant,
  q_pos,
  kv_pos,
  q_head,
  request,
  q_len,
  kv_len,
  operand,
  add,
  subtract,
  less,
  less_equal,
  equal,
  truth,
  negate,
  both,
  either,
};

struct Instruction {
  Opcode opcode;
  OperandScope scope = OperandScope::request;  // of `operand`
  int32_t left = -1;                           // earlier instructions
  int32_t right = -1;
  int32_t operand = -1;  // index into Program::operands
  int64_t constant = 0;  // of `constant`, and 0 or 1 for `truth`
};

// The last instruction is the mask's truth.
struct Program {
  std::vector<Instruction> code;
  std::vector<OperandDeclaration> operands;
  bool depends_on_head = false;
};

Program compile(const Mask& mask);

// One request's facts. operand[i] belongs to Program::operands[i] and already points at the request's own values:
// its value (scope request), its first new token (query), its first key (key). Lengths, positions and operands are
// those of the whole request, whichever of its keys are shown; keys are numbered among those.
struct ProgramInput {
  int32_t request = 0;
  int32_t q_len = 0;
  int32_t kv_len = 0;
  std::vector<const int32_t*> operand;
  index::ShownKeys keys = {};

  int32_t q_pos(int32_t query) const { return query + kv_len - q_len; }
  int32_t kv_pos(int32_t key) const { return keys.position(key, q_len, kv_len); }
};

struct Tile {
  int32_t query_begin, query_end;  // new tokens of the request
  int32_t kv_begin, kv_end;        // shown keys
  int32_t head_begin, head_end;    // query heads
};

// Sound for every expression: empty and full are proofs by interval arithmetic.
TileClass classify(const Program& program, const ProgramInput& input, const Tile& tile);

// A maximal run of keys whose tiles share a class; empty runs are left out.
struct KeySegment {
  int32_t begin;
  int32_t end;
  TileClass tile_class;
  bool operator==(const KeySegment&) const = default;
};

// Classifies the tile grid (absolute multiples of tile_kv) of [kv_begin, kv_end) for these queries and heads and
// appends the runs. Bisects, so that wide empty or full ranges cost one step.
void append_segments(const Program& program, const ProgramInput& input, Tile range, int32_t tile_kv,
                     std::vector<KeySegment>& segments);

// Segments that append_segments makes for one range at most; INT32_MAX where operands of single keys decide.
int32_t max_segments(const Program& program);

// What evaluate_row knows of an instruction over a row of keys. Values: base + slope·k, or lanes. Truths: the run of
// keys [begin, end), or lanes.
struct RowValue {
  int64_t base = 0;
  int64_t slope = 0;
  int64_t low = 0;  // bounds of a value
  int64_t high = 0;
  int32_t begin = 0;
  int32_t end = 0;
  bool is_lanes = false;
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;
};

// Buffers of evaluate_row, reused from row to row.
struct RowScratch {
  std::vector<RowValue> values;
  std::vector<int32_t> narrow;
  std::vector<int64_t> wide;
};

// visible[k] = -1 (all bits) where the query sees the shown key kv_begin + k, else 0.
void evaluate_row(const Program& program, const ProgramInput& input, int32_t query, int32_t q_head, int32_t kv_begin,
                  int32_t kv_end, int32_t* visible, RowScratch& scratch);

}  // namespace qkv::mask
