// What a block's backward runs again, from what is kept: the blocks of GPT-2 and Llama (without dropout), operation by
// operation, written here from their definitions. It knows no tape, no plan and no ledger.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/launcher/training_run.h"

namespace regather::testing {

// kind makes `made` of `of`; its backward reads `saved`. flops: of a token.
struct HandOperation {
  std::string_view kind, made;
  std::vector<std::string_view> of, saved;
  double flops;
};

// Without the last product and the last residual, which no backward reads. "x" is the block's input.
inline std::vector<HandOperation> operations_by_hand(const RunSetup& s) {
  const auto C = static_cast<double>(s.model.hidden), T = static_cast<double>(s.sequence),
             H = static_cast<double>(s.model.heads),
             K = s.model.kv_heads > 0 ? static_cast<double>(s.model.kv_heads) : H, D = C / H;
  const bool gpt2 = s.model.type == "gpt2";
  const double F = gpt2 ? 4 * C : static_cast<double>(s.model.ffn_hidden), qkv = (H + 2 * K) * D,
               norm = (gpt2 ? 8 : 5) * C, attention = 2 * C * (T + 1);  // two products, of half of the pairs
  const std::string_view norms = gpt2 ? "layer_norm" : "rms_norm", scores = gpt2 ? "attn.qkv" : "attn.rope";
  std::vector<HandOperation> block = {{norms, "attn.norm", {"x"}, {"x"}, norm},
                                      {"linear", "attn.qkv", {"attn.norm"}, {"attn.norm"}, 2 * C * qkv},
                                      {"attention", "attn.core", {scores}, {scores, "attn.core"}, attention},
                                      {"linear", "attn.out", {"attn.core"}, {"attn.core"}, 2 * C * C},
                                      {"add", "mid", {"x", "attn.out"}, {}, C},
                                      {norms, "mlp.norm", {"mid"}, {"mid"}, norm},
                                      {"linear", "mlp.up", {"mlp.norm"}, {"mlp.norm"}, 2 * C * F}};
  if (gpt2) {
    block.push_back({"gelu", "mlp.act", {"mlp.up"}, {"mlp.up"}, 20 * F});
  } else {
    block.push_back({"rope", "attn.rope", {"attn.qkv"}, {}, 6 * (H + K) * D / 2});
    block.push_back({"linear", "mlp.gate", {"mlp.norm"}, {"mlp.norm"}, 2 * C * F});
    block.push_back({"swiglu", "mlp.act", {"mlp.gate", "mlp.up"}, {"mlp.gate", "mlp.up"}, 16 * F});
  }
  block.push_back({"linear", "mlp.down", {"mlp.act"}, {"mlp.act"}, 0});  // only read for its gradient
  return block;
}

using KeptNames = std::set<std::string, std::less<>>;

// Of all that is costly, as the last block of a step keeps it: everything but norms and the MLP's activation.
inline KeptNames costly_by_hand(const RunSetup& s) {
  KeptNames kept;
  for (const HandOperation& op : operations_by_hand(s))
    if (op.made.find("norm") == std::string_view::npos && op.made != "mlp.act") kept.emplace(op.made);
  return kept;
}

struct Reruns {
  double flops = 0;
  std::map<std::string, int, std::less<>> operations;  // by kind
  // A block's backward, of so many tokens.
  void add(const RunSetup& s, const KeptNames& kept, double tokens) {
    const std::vector<HandOperation> block = operations_by_hand(s);
    std::set<std::string_view> again;
    const std::function<void(std::string_view)> need = [&](std::string_view value) {
      if (value == "x" || kept.contains(value) || !again.insert(value).second) return;
      for (const HandOperation& op : block) {
        if (op.made != value) continue;
        flops += op.flops * tokens;
        ++operations[std::string(op.kind)];
        for (const std::string_view input : op.of) need(input);
      }
    };
    for (const HandOperation& op : block)
      for (const std::string_view value : op.saved) need(value);
  }
};

}  // namespace regather::testing
