#include "tensor/trace.h"

#include "tensor/work.h"

namespace regather {

void Trace::operation(Kind kind, std::string_view name, double flops) {
  static constexpr std::string_view kVerbs[] = {"run ", "rerun ", "backward "};
  if (kind == Kind::Run) forward_flops += flops;
  if (kind == Kind::Rerun) recomputed_flops += flops;
  if (kind != Kind::Backward) {
    auto& counts = kind == Kind::Rerun ? reruns : runs;
    auto at = counts.find(name);
    if (at == counts.end()) at = counts.emplace(name, 0).first;
    ++at->second;
  }
  if (keep_lines) lines.push_back(std::string(kVerbs[static_cast<int>(kind)]).append(name));
}

Shadowed::Shadowed(Trace* trace) : trace_(trace && trace->in_flight && trace->in_flight() ? trace : nullptr) {
  if (!trace_) return;
  begin_ = steady_seconds();
  waited_ = trace_->waited_seconds;
}

Shadowed::~Shadowed() {
  if (trace_) trace_->hidden_seconds += steady_seconds() - begin_ - (trace_->waited_seconds - waited_);
}

Waiting::Waiting(Trace* trace) : trace_(trace) {
  if (trace_) begin_ = steady_seconds();
}

Waiting::~Waiting() {
  if (trace_) trace_->waited_seconds += steady_seconds() - begin_;
}

}  // namespace regather
