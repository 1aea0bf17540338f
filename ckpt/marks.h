// The names that a plan can use: what each block of a model marks, found by running its own code without storage, and
// what a name in a configuration stands for. It decides nothing and keeps nothing.
#pragma once
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/block.h"

namespace regather {

using Marks = std::vector<std::string>;
inline constexpr std::string_view kInput = "input";  // what offload calls a block's input, which no operation marks

// What the forward of each block makes, in order, for tokens of this shape [B, T]: names, bytes (of fp32 elements),
// flops.
std::vector<std::vector<Tape::ValueReport>> trace_blocks(const Model& model, const Shape& tokens,
                                                         const SavePlan& plan = keep_all());
// The marks of each block, in the order in which it makes them; and those of the values that policy none keeps.
std::vector<Marks> marks_of(const Model& model, const Shape& tokens = {1, 1});
std::vector<Marks> costly_marks_of(const Model& model, const Shape& tokens = {1, 1});

// Levels: names for what is kept together. A level is a few patterns; a model needs to have one of them.
struct MarkLevel {
  std::string_view name;
  std::array<std::string_view, 3> patterns;  // empty: no more
};
std::span<const MarkLevel> mark_levels();

// The marks that these names stand for, in the order of `marks`. A name is a level, a mark, the part of a mark after
// its last dot, or a pattern with *, ? or [..]. Throws UsageError for a name that stands for none, with what is
// allowed.
Marks expand_marks(const std::vector<std::string>& names, const Marks& marks);

}  // namespace regather
