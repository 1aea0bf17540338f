#include "tensor/trace.h"

#include <chrono>

namespace regather {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Traced::Traced(Trace* trace, Trace::Kind kind, std::string_view name, double flops) : trace_(trace) {
  if (!trace_) return;
  static constexpr std::string_view kVerbs[] = {"run ", "rerun ", "backward "};
  if (kind == Trace::Kind::Run) trace_->forward_flops += flops;
  if (kind == Trace::Kind::Rerun) trace_->recomputed_flops += flops;
  if (kind != Trace::Kind::Backward) {
    auto& counts = kind == Trace::Kind::Rerun ? trace_->reruns : trace_->runs;
    auto at = counts.find(name);
    if (at == counts.end()) at = counts.emplace(name, 0).first;
    ++at->second;
  }
  if (trace_->keep_lines) trace_->lines.push_back(std::string(kVerbs[static_cast<int>(kind)]).append(name));
  if (trace_->timed) span_ = {kind, std::string(name), now(), 0, flops};
}

Traced::~Traced() {
  if (!trace_ || !trace_->timed) return;
  span_.seconds = now() - span_.begin;
  trace_->spans.push_back(std::move(span_));
}

}  // namespace regather
