// Runs one part of the model: where sharding and checkpointing meet. Every pass acquires the part's units once, with
// the pass stated, and what a backward has to run again runs under the backward's own lease: it never gathers a second
// time. Tapes are per micro-batch. It interprets; what runs when is decided by the step plan.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "dist/shard_unit.h"
#include "tensor/block.h"

namespace regather {

class BlockRunner {
 public:
  // plan: what forward keeps. name: for messages ("block 7"). Unread: nothing before this part is trained, so that the
  // gradients of its inputs are not computed; those of its parameters are. offloader: where values go that the plan
  // offloads.
  enum class InputGradients { Read, Unread };
  BlockRunner(const Part& part, std::string name, std::vector<ShardUnit*> units, Device& device, SavePlan plan,
              int micro_batches, InputGradients input_gradients, Offloader* offloader = nullptr);

  // Called when the units are acquired and before anything is computed: the time to start the next gather.
  using Acquired = std::function<void()>;
  // InPlace: what the plan offloads stays on the device. Costly, as policy none: this micro-batch's backward comes
  // next.
  enum class Keep { AsPlanned, InPlace, Costly };

  // (inputs) -> outputs.
  Activations forward(int micro_batch, Activations x, const RngKey& key, Keep keep, const Acquired& acquired);
  void drop_inputs(int micro_batch);
  void bind_inputs(int micro_batch, const Activations& x);
  Activations replay(int micro_batch, const Acquired& acquired);  // the outputs once more
  // Gradients of outputs -> gradients of inputs. reduces: units whose gradients are reduced when it is done.
  // no_parameters: the part's backward reads none, nothing is acquired.
  enum class Reads { Parameters, NoParameters };
  Activations backward(int micro_batch, Activations dy, const std::vector<ShardUnit*>& reduces, Reads reads,
                       const Acquired& acquired);
  // A loss: forward and backward under one lease. Returns the gradients of the inputs; `y` receives the outputs.
  Activations forward_backward(Activations x, Activations dy, const RngKey& key, const std::vector<ShardUnit*>& reduces,
                               const Acquired& acquired, Activations& y);
  Activations evaluate(const Activations& x, const Acquired& acquired);
  const std::string& name() const { return name_; }
  void leave(int micro_batch);  // offloaded values give back their device memory
  void fetch(int micro_batch);  // and start to come back
  // From the next forward on: what is dropped or offloaded is compared by value when it is there again.
  void audit(bool on) { audit_ = on; }
  void forget() noexcept;  // tapes of a step that did not end

 private:
  std::vector<ShardUnit::Lease> acquire(Pass pass, const Acquired& acquired);
  ParamView view() const;
  Activations record(Tape& tape, Activations x, const ParamView& params);
  Gradients gradients(const std::vector<ShardUnit*>& reduces);

  const Part& part_;
  std::string name_;
  std::vector<ShardUnit*> units_;
  Device& device_;
  SavePlan plan_;
  Offloader* offloader_;
  bool audit_ = false;
  InputGradients input_gradients_;
  std::vector<std::unique_ptr<Tape>> tapes_;
};

}  // namespace regather
