#include "ckpt/marks.h"

#include <fnmatch.h>

#include <algorithm>
#include <iterator>

namespace regather {
namespace {

constexpr MarkLevel kLevels[] = {
    {"norms", {"*.norm"}},
    {"attention_core", {"*.core"}},
    {"mlp", {"mlp.gate", "mlp.up", "mlp.act"}},  // its wide values
};

bool matches(std::string_view pattern, const std::string& mark) {
  return pattern == mark || pattern == std::string_view(mark).substr(mark.rfind('.') + 1) ||
         fnmatch(std::string(pattern).c_str(), mark.c_str(), FNM_NOESCAPE) == 0;
}

// Does the name stand for this mark?
bool names(const std::string& name, const std::string& mark) {
  const auto level = std::ranges::find(kLevels, name, &MarkLevel::name);
  if (level == std::end(kLevels)) return matches(name, mark);
  return std::ranges::any_of(level->patterns, [&](std::string_view p) { return !p.empty() && matches(p, mark); });
}

template <class Wanted>
std::vector<Marks> marked(const std::vector<std::vector<Tape::ValueReport>>& blocks, Wanted wanted) {
  std::vector<Marks> all;
  for (const auto& values : blocks) {
    Marks& marks = all.emplace_back();
    for (const Tape::ValueReport& v : values)
      if (v.marked && wanted(v) && std::ranges::find(marks, v.name) == marks.end()) marks.push_back(v.name);
  }
  return all;
}

}  // namespace

std::vector<std::vector<Tape::ValueReport>> trace_blocks(const Model& model, const Shape& tokens,
                                                         const SavePlan& plan) {
  CpuDevice device(Allocator::Mode::Meta);
  std::vector<DescribedUnit> sources;
  for (const UnitSpec& unit : model.units) sources.emplace_back(unit, DType::F32);
  const auto view = [&](const Part& part) {
    ParamView params;
    for (int unit : part.units) params.append(sources.at(static_cast<std::size_t>(unit)));
    return params;
  };
  const ParamView embedding = view(model.embedding);
  Run start{device, embedding};
  Activations x = model.embedding.block->forward(start, {Tensor(device.memory, tokens, Tag::Workspace, DType::I32)});
  std::vector<std::vector<Tape::ValueReport>> values;
  for (const Part& part : model.blocks) {
    const ParamView params = view(part);
    Tape tape(device, plan);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = tape.input(std::move(x[i]), part.block->differentiable(i));
    Run run{device, params, &tape};
    x = part.block->forward(run, x);
    tape.outputs(x);
    for (Tensor& t : x) t.tape = 0;
    values.push_back(tape.report());
  }
  return values;
}

std::vector<Marks> marks_of(const Model& model, const Shape& tokens) {
  return marked(trace_blocks(model, tokens), [](const Tape::ValueReport&) { return true; });
}

std::vector<Marks> costly_marks_of(const Model& model, const Shape& tokens) {
  return marked(trace_blocks(model, tokens, keep_costly()),
                [](const Tape::ValueReport& v) { return v.state == ValueState::Kept; });
}

std::span<const MarkLevel> mark_levels() { return kLevels; }

Marks expand_marks(const std::vector<std::string>& wanted, const Marks& marks) {
  for (const std::string& name : wanted) {
    if (std::ranges::any_of(marks, [&](const std::string& mark) { return names(name, mark); })) continue;
    std::vector<std::string_view> levels;
    for (const MarkLevel& l : kLevels) levels.push_back(l.name);
    throw UsageError(
        fmt::format("'{}' matches no mark of this model; allowed: its marks {}, the part of one after its last dot, a "
                    "pattern with *, or a level ({})",
                    name, fmt::join(marks, ", "), fmt::join(levels, ", ")));
  }
  Marks out;
  std::ranges::copy_if(marks, std::back_inserter(out), [&](const std::string& mark) {
    return std::ranges::any_of(wanted, [&](const std::string& name) { return names(name, mark); });
  });
  return out;
}

}  // namespace regather
