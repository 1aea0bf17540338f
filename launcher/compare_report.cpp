#include "launcher/compare_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "launcher/progress.h"
#include "launcher/report_parts.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

struct Traffic {
  std::int64_t count = 0, bytes = 0;
  bool operator==(const Traffic&) const = default;
};
Traffic traffic(const PolicyResult& p, Collective collective) {
  Traffic sum;
  for (const auto& [key, counts] : p.collectives)
    if (key.collective == collective) {
      sum.count += counts.count;
      sum.bytes += counts.wire_bytes;
    }
  return sum;
}
Traffic traffic(const PolicyResult& p) {
  Traffic sum;
  for (const auto& [key, counts] : p.collectives) {
    sum.count += counts.count;
    sum.bytes += counts.wire_bytes;
  }
  return sum;
}

double ratio(std::int64_t a, std::int64_t b) { return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 1; }
std::string difference(double value) { return value == 0 ? "0" : fmt::format("{:.2e}", value); }

const PolicyResult* reference_of(const Comparison& c) {
  return c.reference < 0 ? nullptr : &c.policies[static_cast<std::size_t>(c.reference)];
}
bool fits(const Comparison& c, const PolicyResult& p) { return p.planned.total <= c.memory_limit; }

// What is offloaded: beside what a rank's device holds, no part of its peak.
std::int64_t on_host(const MemoryPeak& peak) { return peak.peak_of[index(Tag::Host)]; }

Tag largest_part(const MemoryPeak& peak) {
  return *std::ranges::max_element(kKinds, {}, [&](Tag t) { return peak.at_peak[index(t)]; });
}

// "activations 6.1x smaller"
std::string sizes(std::string_view what, std::int64_t now, std::int64_t reference) {
  const double r = ratio(reference, now), times = std::max(r, 1 / r);
  if (times < 1.005) return fmt::format("{} unchanged", what);
  return fmt::format("{} {:.{}f}x {}", what, times, times < 1.5 ? 2 : 1, r > 1 ? "smaller" : "larger");
}

bool measured_once(const Comparison& c) { return c.steps * c.rounds <= 1; }  // then there is no spread to go by
double noise_of(const PolicyResult& a, const PolicyResult& b) { return std::max({a.spread, b.spread, 0.01}); }

std::string speed(const Comparison& c, const PolicyResult& p, const PolicyResult& reference) {
  if (measured_once(c)) return "as fast as can be told (one measurement)";
  const double noise = noise_of(p, reference);
  if (std::abs(p.slowdown - 1) <= noise) return fmt::format("as fast (within {:.0f}%)", std::ceil(noise * 100));
  return p.slowdown > 1 ? fmt::format("{:.2f}x slower", p.slowdown) : fmt::format("{:.2f}x faster", 1 / p.slowdown);
}

std::string communication(const PolicyResult& p, const PolicyResult& reference) {
  std::string text = "communication unchanged";
  const Traffic mine = traffic(p), theirs = traffic(reference);
  if (mine != theirs) {
    const std::int64_t more = mine.count - theirs.count;
    text = fmt::format("{:.2f}x the communication ({} {} collective{} a step)", ratio(mine.bytes, theirs.bytes),
                       std::abs(more), more < 0 ? "fewer" : "more", std::abs(more) == 1 ? "" : "s");
  }
  return p.as_planned() ? text : text + ", NOT as planned";
}

std::string numbers(const PolicyResult& p) {
  if (p.identical) return "gradients identical";
  return fmt::format("NOT the same numbers (loss differs by {}, gradients by {})", difference(p.loss_difference),
                     difference(p.gradient_difference));
}

std::string advice(const Comparison& c, const PolicyResult& p, Tag tag) {
  switch (tag) {
    case Tag::Parameters:
    case Tag::Gradients:
    case Tag::Optimizer:
      return c.sharded ? "shard over more ranks or train fewer parameters (model.frozen, model.lora)"
                       : "shard it over the ranks (sharding.strategy: full)";
    case Tag::Gathered:
      return c.resident_slots > 1 ? "fewer full blocks at a time (sharding.resident_slots) need less"
                                  : "one block's parameters are all that is gathered; smaller blocks need less";
    case Tag::Activations:
      if (p.policy == "none") return "checkpointing makes it smaller";
      return p.policy == "full" || p.policy == "segments"
                 ? "a shorter sequence or a smaller micro-batch makes it smaller"
                 : "checkpointing more layers makes it smaller";
    case Tag::Workspace: return "a smaller micro-batch makes it smaller";
    case Tag::Host: break;
  }
  return "";
}
std::string_view in_words(Tag tag) { return tag == Tag::Optimizer ? "optimizer state" : name_of(tag); }

std::string largest(const Comparison& c, const PolicyResult& p, std::string_view now) {
  const Tag tag = largest_part(p.measured);
  return fmt::format("The largest part is {}{} ({:.0f}%): {}", now, in_words(tag),
                     100 * ratio(p.measured.at_peak[index(tag)], p.measured.total), advice(c, p, tag));
}

std::string verdict_on(const Comparison& c, const PolicyResult& p) {
  if (!p.ran()) return fmt::format("`{}`: {}.", p.policy, p.refused);
  const PolicyResult& reference = *reference_of(c);
  constexpr std::size_t kActivations = index(Tag::Activations);
  if (&p == &reference)
    return fmt::format("`{}`, what the others are compared with: {:.0f} tokens/s, {} at the peak of a rank. {}.",
                       p.policy, p.tokens_per_second, human_bytes(p.measured.total), largest(c, p, ""));
  return fmt::format("`{}`: {}, {}, {}, {}, {}. {}.", p.policy,
                     sizes("activations", p.measured.peak_of[kActivations], reference.measured.peak_of[kActivations]),
                     sizes("peak", p.measured.total, reference.measured.total), speed(c, p, reference),
                     communication(p, reference), numbers(p),
                     largest(c, p, largest_part(p.measured) == largest_part(reference.measured) ? "" : "now "));
}

std::string conclusion(const Comparison& c) {
  const auto ran = [&](auto better) {
    const PolicyResult* best = nullptr;
    for (const PolicyResult& p : c.policies)
      if (p.ran() && (best == nullptr || better(p, *best))) best = &p;
    return best;
  };
  const PolicyResult* fastest = ran([](const auto& a, const auto& b) { return a.slowdown < b.slowdown; });
  const PolicyResult* smallest = ran([](const auto& a, const auto& b) { return a.measured.total < b.measured.total; });
  if (fastest == nullptr) {
    const auto& least = *std::ranges::min_element(c.policies, {}, [](const auto& p) { return p.planned.total; });
    return fmt::format("No policy fits. `{}` needs least, {}, most of it {}: {}.", least.policy,
                       human_bytes(least.planned.total), in_words(largest_part(least.planned)),
                       advice(c, least, largest_part(least.planned)));
  }
  const std::string of_those = std::ranges::all_of(c.policies, &PolicyResult::ran) ? "" : "Of those that fit: ";
  std::vector<std::string> as_fast;  // as far as the spread tells
  for (const PolicyResult& p : c.policies)
    if (p.ran() && p.slowdown / fastest->slowdown - 1 <= noise_of(p, *fastest))
      as_fast.push_back(fmt::format("`{}`", p.policy));
  const std::string least =
      fmt::format("`{}` needs least memory, {} a rank", smallest->policy, human_bytes(smallest->measured.total));
  if (measured_once(c)) return fmt::format("{}{}; one measurement each does not rank their speeds.", of_those, least);
  if (as_fast.size() > 1)
    return fmt::format("{}{} are as fast as each other, within the spread; {}.", of_those, fmt::join(as_fast, ", "),
                       least);
  if (fastest == smallest)
    return fmt::format("{}`{}` is the fastest and needs least memory, {} a rank.", of_those, fastest->policy,
                       human_bytes(smallest->measured.total));
  return fmt::format("{}`{}` is the fastest; `{}` needs least memory, {} instead of {} a rank.", of_those,
                     fastest->policy, smallest->policy, human_bytes(smallest->measured.total),
                     human_bytes(fastest->measured.total));
}

using Cell = std::function<std::string(const PolicyResult&)>;

}  // namespace

bool holds(const Comparison& c) {
  return std::ranges::all_of(c.policies,
                             [](const PolicyResult& p) { return !p.ran() || (p.identical && p.as_planned()); });
}

TextTable comparison_table(const Comparison& c) {
  std::vector<std::string> head = {""};
  for (const PolicyResult& p : c.policies) head.push_back(p.policy);
  TextTable table(head);
  const auto row = [&](const std::string& name, const Cell& cell) {
    std::vector<std::string> cells = {name};
    for (const PolicyResult& p : c.policies) cells.push_back(cell(p));
    table.row(std::move(cells));
  };
  const auto measured = [&](const std::string& name, const Cell& cell) {
    row(name, [&](const PolicyResult& p) { return p.ran() ? cell(p) : "-"; });
  };
  table.heading("memory of a rank, MiB");
  row("  planned", [](const auto& p) { return mebibytes(p.planned.total); });
  const std::string limit = c.memory_limit > 0 ? fmt::format(" ({})", human_bytes(c.memory_limit)) : "";
  row("  fits memory.limit" + limit, [&](const auto& p) { return limit.empty() ? "-" : fits(c, p) ? "yes" : "NO"; });
  const auto memory = [&](const std::string& name, const auto& bytes) {  // in brackets: planned, and not run
    row(name, [&](const PolicyResult& p) {
      return p.ran() ? mebibytes(bytes(p.measured)) : fmt::format("({})", mebibytes(bytes(p.planned)));
    });
  };
  memory("  peak", [](const MemoryPeak& m) { return m.total; });
  for (const Tag tag : kKinds)
    memory(fmt::format("    {}", name_of(tag)), [&](const MemoryPeak& m) { return m.at_peak[index(tag)]; });
  for (const Tag tag : {Tag::Activations, Tag::Gathered})
    memory(fmt::format("  {}, at most", name_of(tag)), [&](const MemoryPeak& m) { return m.peak_of[index(tag)]; });
  if (std::ranges::any_of(c.policies,
                          [](const PolicyResult& p) { return on_host(p.planned) + on_host(p.measured) > 0; }))
    memory("  in host memory, at most", on_host);
  table.heading("speed");
  measured("  tokens/s", [](const auto& p) { return fmt::format("{:.0f}", p.tokens_per_second); });
  const PolicyResult* reference = reference_of(c);
  const std::string than = reference ? reference->policy : "none";
  measured("  relative to " + than, [](const auto& p) { return fmt::format("{:.2f}x", 1 / p.slowdown); });
  measured("  spread", [&](const auto& p) {
    return c.steps * c.rounds > 1 ? fmt::format("+-{:.1f}%", 100 * p.spread) : std::string("-");
  });
  measured("  recomputed, of a forward", [](const auto& p) {
    return fmt::format("{:.0f}%", p.forward_flops > 0 ? 100 * p.recomputed_flops / p.forward_flops : 0.0);
  });
  table.heading("collectives of a rank and step");
  for (const auto& [name, collective] : {std::pair{"  all-gather", Collective::AllGather},
                                         {"  reduce-scatter", Collective::ReduceScatter},
                                         {"  all-reduce", Collective::AllReduce}})
    measured(name, [of = collective](const auto& p) { return fmt::format("{}", traffic(p, of).count); });
  measured("  MiB on the wire", [](const auto& p) { return mebibytes(traffic(p).bytes); });
  measured("  as planned", [](const auto& p) { return p.as_planned() ? "yes" : "NO"; });
  table.heading("largest difference to " + than);
  measured("  loss", [](const auto& p) { return difference(p.loss_difference); });
  measured("  gradients", [](const auto& p) { return difference(p.gradient_difference); });
  measured("  every bit the same", [](const auto& p) { return p.identical ? "yes" : "NO"; });
  return table;
}

std::vector<std::string> verdict(const Comparison& c) {
  std::vector<std::string> lines;
  if (reference_of(c)) lines.push_back(verdict_on(c, *reference_of(c)));
  for (const PolicyResult& p : c.policies)
    if (&p != reference_of(c)) lines.push_back(verdict_on(c, p));
  lines.push_back(conclusion(c));
  return lines;
}

std::string comparison_markdown(const Comparison& c, const std::string& memory_picture,
                                const std::string& time_picture) {
  std::string text = fmt::format(
      "# Checkpoint policies compared: {}\n\n"
      "The same model, start values and batches under each policy. {}; {} rank{}; {}. Medians of {} round{} of {} "
      "step{}; policies take turns, and a warm-up step is not counted.\n\n",
      c.name, c.model, c.world, c.world == 1 ? "" : "s", c.batch, c.rounds, c.rounds == 1 ? "" : "s", c.steps,
      c.steps == 1 ? "" : "s");
  for (const std::string& line : verdict(c)) text += "- " + line + "\n";
  text +=
      fmt::format("\n![memory of a rank over one step, by kind]({})\n\n![time of a step against peak memory]({})\n\n",
                  memory_picture, time_picture);
  text += comparison_table(c).markdown();
  text += "\nThe policies:\n\n";
  for (const PolicyResult& p : c.policies) {
    text += fmt::format("- {}\n", p.detail);
    for (const std::string& line : p.communication_differs) text += "  - communication differs: " + line + "\n";
  }
  text +=
      "\nWhat is counted:\n\n"
      "- parameters, gradients, optimizer: what a rank holds through the step, its share of the model.\n"
      "- gathered: full copies of the blocks in use. activations: what forward keeps for backward. workspace: scratch, "
      "gradients of activations, a block's full gradient until it is reduced.\n"
      "- the kinds under `peak` are those at the moment of the largest total, and add up to it; `at most` is a kind's "
      "own maximum, at another moment.\n"
      "- `planned` is known before anything is allocated; figures in brackets are planned and the policy was not "
      "run.\n"
      "- the loss is compared in every step of the first round, the gradient of every parameter in its first step.\n";
  return text;
}

namespace {

Json peak_json(const MemoryPeak& peak) {
  return {{"peak", peak.total},
          {"at_peak", Json::parse(kinds_json(peak.at_peak))},
          {"peak_of", Json::parse(kinds_json(peak.peak_of))},
          {"host_bytes", on_host(peak)}};
}
// JSON has no infinity.
Json finite(double value) { return std::isfinite(value) ? Json(value) : Json("infinite"); }

Json timeline_json(const MemoryTimeline& timeline) {
  Json seconds = Json::array(), bytes = Json::object();
  for (const Tag tag : kKinds) bytes[std::string(name_of(tag))] = Json::array();
  for (const MemoryTimeline::Point& point : timeline.points) {
    seconds.push_back(point.seconds);
    for (const Tag tag : kKinds) bytes[std::string(name_of(tag))].push_back(point.live[index(tag)]);
  }
  return {{"step_seconds", timeline.seconds}, {"seconds", seconds}, {"bytes", bytes}};
}

Json measured_json(const PolicyResult& p) {
  return {{"memory_bytes", peak_json(p.measured)},
          {"resident_growth_bytes", p.resident_growth},
          {"tokens_per_second", p.tokens_per_second},
          {"step_seconds", p.seconds},
          {"step_seconds_of_rounds", p.step_seconds},
          {"spread", p.spread},
          {"slowdown", p.slowdown},
          {"forward_flops", p.forward_flops},
          {"recomputed_flops", p.recomputed_flops},
          {"collectives",
           {{"per_step", Json::parse(collectives_json(p.collectives))},
            {"expected_matches", p.as_planned()},
            {"differences", p.communication_differs}}},
          {"loss", finite(p.loss)},
          {"loss_difference", finite(p.loss_difference)},
          {"gradient_difference", finite(p.gradient_difference)},
          {"identical", p.identical},
          {"timeline", timeline_json(thinned(p.timeline, 400))}};
}

}  // namespace

std::string to_json(const Comparison& c) {
  Json policies = Json::array();
  for (const PolicyResult& p : c.policies) {
    Json json = {{"policy", p.policy},
                 {"description", p.detail},
                 {"ran", p.ran()},
                 {"refused", p.refused},
                 {"planned_bytes", peak_json(p.planned)},
                 {"fits_limit", c.memory_limit > 0 ? Json(fits(c, p)) : Json(nullptr)}};
    if (p.ran()) json.update(measured_json(p));
    policies.push_back(std::move(json));
  }
  const PolicyResult* reference = reference_of(c);
  const Json json = {{"config", Json::parse(c.configuration)},
                     {"world", c.world},
                     {"steps", c.steps},
                     {"rounds", c.rounds},
                     {"reference", reference ? Json(reference->policy) : Json(nullptr)},
                     {"memory_limit", c.memory_limit},
                     {"holds", holds(c)},
                     {"verdict", verdict(c)},
                     {"policies", policies}};
  return json.dump(2) + "\n";
}

}  // namespace regather
