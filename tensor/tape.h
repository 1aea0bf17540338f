// The rematerialising tape of one block and one micro-batch. It records operations, not results: a SavePlan says which
// values are kept, and where; every other value lives only as long as the model's own handle, and backward runs its
// producers again when it needs it. Invariants: parameters are never held (replay and backward receive a ParamView); in
// one backward an operation is rerun at most once, only if needed, in record order, never recursively; every value is
// freed at its last use. It does not know shards, gathers, blocks or policies.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/offload.h"
#include "tensor/op.h"
#include "tensor/recorder.h"
#include "tensor/trace.h"

namespace regather {

enum class Placement { Keep, Drop, Offload };  // Offload: kept, in host memory
// Lazy: rerun when needed. Ahead: first rerun what needs no parameter of more than one dimension, in the shadow of the
// gather (1-D ones do not wait for it: dist/shard_unit.h). Eager: rerun everything first, as a second forward would.
// Lazy is usually, but not always, the lowest peak.
enum class Order { Lazy, Ahead, Eager };
struct SavePlan {
  Placement unmarked = Placement::Keep, inputs = Placement::Keep;  // inputs are never dropped but by drop_inputs()
  std::map<std::string, Placement, std::less<>> marks{};
  // What is made by operations that are cheap to run again, of inputs of the block or of values that they save. Keep:
  // as others.
  Placement cheap = Placement::Keep;
  Order order = Order::Lazy;
  bool verify = false;  // hash every dropped value and compare after a rerun

  std::vector<std::string> placed(Placement where) const;  // the marks that are
};
inline SavePlan keep_all() { return {}; }
inline SavePlan keep_costly() { return {.cheap = Placement::Drop}; }  // all but what is cheap to compute again
inline SavePlan drop_all() { return {.unmarked = Placement::Drop}; }
SavePlan keep_only(const std::vector<std::string>& marks);

enum class ValueState { Dropped, Kept, Offloaded, Materialised };
enum class Retain { Nothing, Saved };  // what a replay leaves behind for backward

class Tape {
 public:
  // offloader: of plans that offload.
  Tape(Device& device, SavePlan plan, RngKey key = {}, Offloader* offloader = nullptr);
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // Recording. input(): a block input, kept until drop_inputs(). Returned handles are this tape's values.
  Tensor input(Tensor x, bool needs_grad);
  Activations record(std::unique_ptr<const Op> op, Activations in, const ParamView& params, std::vector<int> param_ids);
  // Names a value, so that a plan can place it, and with it the unnamed outputs of the same operation: what is kept is
  // not run again for the sake of a sibling.
  Tensor mark(std::string_view name, Tensor y);
  // Ends the recording: what was kept and no backward will read is given back, what is offloaded sets out.
  void outputs(const Activations& y);
  void leave();  // what set out has arrived: its device memory is given back
  void fetch();  // and starts to come back; what backward needs before that, it fetches itself

  // Dropped inputs have to be bound again before replay() or backward(). replay() gives the block's outputs once more.
  void drop_inputs();
  void bind_inputs(const Activations& x);
  Activations replay(const ParamView& params, Retain retain);
  // dy[k]: gradient of the k-th output, undefined for none. Returns the inputs' gradients. Once; the tape is spent.
  Activations backward(const ParamView& params, Activations dy, const Gradients& grads);

  struct ValueReport {
    std::string name, producer;
    std::int64_t bytes;
    bool saved, marked;
    double flops;
    ValueState state;
  };
  std::vector<ValueReport> report() const;  // what a planner enumerates

 private:
  struct Value {
    ValueType type;
    int producer = -1;                                                     // node; -1: an input or a constant
    bool needs_grad = false, saved = false, held = false, pinned = false;  // pinned: no plan may drop it
    Placement placement = Placement::Keep;
    int uses = 0;  // reads still to come: by backward, by reruns, by the caller of replay
    unsigned version = 0;
    std::uint64_t hash = 0;
    std::string name;
    Tensor data;
    Offloaded away;
    bool there() const { return data || away; }
    void free() { data.reset(), away = {}; }
  };
  struct Node {
    std::unique_ptr<const Op> op;
    std::vector<int> in, out, params;
    std::vector<Shape> shapes;  // in which it reads its inputs: a view is another shape of the same value
    Needs needs;
    Saved saved;
    RngKey key;
    double flops = 0;
    bool rerun = false, flows = false, queued = false;
  };
  struct Output {
    int id;
    Shape shape;
  };
  enum class Phase { Recording, Replaying, Backward, Spent };

  Value& value(int id) { return values_[static_cast<std::size_t>(id)]; }
  const Value& value(int id) const { return values_[static_cast<std::size_t>(id)]; }
  Node& node(int n) { return nodes_[static_cast<std::size_t>(n)]; }
  Value& own(const Tensor& t, std::string_view where);
  std::string label(const Value& v) const;
  std::string label(const Node& n) const;
  int new_value(const Tensor& t, int producer, bool needs_grad);
  void hold(Value& v, const Tensor& t);
  std::vector<bool> differentiable_outputs() const;
  int adopt(Tensor& t, const Op& op);
  bool runs_again_for_little(const Node& n) const;
  Recorder::Interval interval(const Node& n, Recorder::Activity activity, const ParamView& params) const;
  Activations run_node(Node& n, std::span<const Tensor> in, const ParamView& params, Trace::Kind kind);
  void find_flow(const std::vector<bool>& output_has_gradient);
  void count_uses(bool for_caller, bool for_backward);
  void rerun_first(const ParamView& params);
  const Tensor& materialise(int id, const ParamView& params);
  void bring_back(Value& v);
  void rerun(Node& n, const ParamView& params);
  void release(int id);
  void backward_node(Node& n, std::vector<Tensor>& gradient, const ParamView& params, const Gradients& grads);
  void add_gradient(std::vector<Tensor>& gradient, int id, Tensor part);
  Activations run_replay(const ParamView& params, Retain retain);
  Activations run_backward(const ParamView& params, Activations dy, const Gradients& grads);
  template <class F>
  Activations spent_if_throws(F f);
  template <class F>
  void for_saved(Node& n, F f);

  Device& device_;
  SavePlan plan_;
  RngKey key_;
  Offloader* offloader_;
  std::uint32_t serial_;
  Phase phase_ = Phase::Recording;
  std::vector<Value> values_;
  std::vector<Node> nodes_;
  std::vector<int> inputs_;
  std::vector<Output> outputs_;
  Activations last_outputs_;  // saved ones of the last operation, while a mark may still place them
};

}  // namespace regather
