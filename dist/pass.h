// Why a collective happens; stated by who starts it, never inferred.
#pragma once
#include <string_view>

namespace regather {

enum class Pass {
  Forward,
  Replay,
  Backward,
  Optimizer,
  Evaluation,
  Save,
  Step
};  // Step: scalars of a step (tokens, loss, norm)
constexpr std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::Forward: return "forward";
    case Pass::Replay: return "replay";
    case Pass::Backward: return "backward";
    case Pass::Optimizer: return "optimizer";
    case Pass::Evaluation: return "evaluation";
    case Pass::Save: return "save";
    case Pass::Step: return "step";
  }
  return "?";
}

}  // namespace regather
