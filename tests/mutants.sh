#!/usr/bin/env bash
# tests/mutants.sh [PATTERN]: do the tests notice when a rule is broken? Changes one rule at a time in a copy of the sources,
# builds only the test program that should notice, and runs it. Prints a table; fails if a mutant survives, if the change no
# longer applies, or if the tests fail without any change. PATTERN (a regular expression): only mutants of matching lines.
# Takes minutes, so it is not part of ctest. Works in build/mutants, which stays for the next call.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$root/build/mutants
pattern=${1-.}
limit=120  # seconds a test may run; a mutant that hangs is noticed

# file | test program | tests | what is changed (sed, without a |) | the rule that is gone
mutants() {
  cat <<'TABLE'
tensor/tape.cpp|tensor_unit_tests|Tape*|s/n.key.op = nodes_.size();/n.key.op = 0;/|every operation has its own random key
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (v.uses == 0 .. v.there()) continue;/if (v.there()) continue;/|a rerun keeps only outputs that are read
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (--v.uses > 0 /if (--v.uses > 1 /|a value is freed at its last use, not before
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (--v.uses > 0 /if (--v.uses > -1 /|a value is freed at its last use, not after
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/ (v.held && phase_ == Phase::Replaying)/ false/|a replay leaves what forward kept
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/std::ranges::sort(todo);//|reruns follow the order of recording
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/in_place = sum.sole_owner();/in_place = true;/|a shared gradient is not written to
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/in_place = sum.sole_owner();/in_place = false;/|a gradient of one's own is added to in place
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/for (int id : n->in) ++value(id).uses;/;/|reruns count as readers
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (v.uses == 0) v.free();  \/\/ kept.*//|what nobody reads is freed before backward
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (needs_grad) n.saved = n.op->saved(n.needs);/n.saved = n.op->saved({kAll, kAll});/|frozen parameters save nothing
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/ready \&\& vectors/ready/|ahead reruns only what needs no matrix
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (plan_.order == Order::Lazy) return;/return;/|ahead and eager rerun first
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/for (Value\& v : values_) v.free();/;/|after an exception the tape holds nothing
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/.view(n.shapes\[i\]));/);/|a rerun sees the shape that forward saw
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/ hash_of(device_, out\[i\]) != v.hash/ false/|verification compares numbers
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (t.tape != serial_) throw/if (false) throw/|another tape's value is refused
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (t.version() != v.version)/if (false)/|a value changed after its recording is noticed
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/if (wanted.data.version() != wanted.version)/if (false)/|a value changed while it is held is noticed
tensor/tape_backward.cpp|tensor_unit_tests|Tape*|s/!n->flows) continue;/false) continue;/|only what a gradient reaches goes backward
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (sibling.producer == v.producer .*$/;/|a mark places the unnamed outputs of its operation
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (v.uses == 0 \&\& v.producer >= 0) {/if (false) {/|what no backward will read is given back after forward
tensor/tape.cpp|tensor_unit_tests|Tape*|s/return n.op->cheap() \&\& n.saved.outputs == 0;/return true;/|only what is cheap is run again under none
tensor/tape.cpp|tensor_unit_tests|Tape*|s/if (!has(n.saved.inputs, i) \&\& value(n.in\[i\]).producer >= 0) return false;/;/|what is cheap is run again only of what is held
tensor/offload.cpp|tensor_sim_tests|Offload*|s/offloader_->wait(stored_);/;/|device memory is given back after the copy
tensor/offload.cpp|tensor_sim_tests|Offload*|s/offloader_->wait(room_.free);.*$/;/|a value that comes back is waited for
tensor/offload.cpp|tensor_sim_tests|Offload*|s/offloader_->give_back(std::move(room_));/;/|host memory is used again
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*|s/if (t + ahead + ahead >= use) continue;//|what backward needs first is not moved
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/first != last_segment \&\& b + 1 < end/b + 1 < end/|the last segment is not replayed
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/b + 1 < end; ++b/b < end; ++b/|the last block of a segment is not replayed
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/ .. b >= last_segment//|the last segment keeps its inputs
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/a.keep_activations = each.keep_activations .*$/a.keep_activations = each.keep_activations;/|only the first backward's micro-batch keeps all
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/a.pass == Pass::Backward ? micro_batches - 1 - i : i/i/|layer-major goes backward in reverse
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/== AccumulationOrder::LayerMajor ? part_ends/== AccumulationOrder::LayerMajor ? true/|layer-major reduces once a part
ckpt/schedule.cpp|ckpt_unit_tests|Schedule*:Reductions*|s/if (unit_ends) done.push_back(unit);//|once means once
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*:ExpectedVolume*|s/if (a.part == kEmbedding \&\& a.pass == Pass::Backward) return {};//|the embedding's backward needs no parameter
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*:ExpectedVolume*|s/if (!contains(resident_roots, unit)) e.gathers/e.gathers/|a resident root unit is not gathered again
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*:ExpectedVolume*|s/if (residency\[t\].gathers) e.gathers/e.gathers/|a resident block is not gathered again
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*:ExpectedVolume*|s/unit.trainable_shard + unit.frozen_shard/unit.trainable_shard/|frozen parameters are gathered as well
ckpt/step_plan.cpp|ckpt_unit_tests|StepPlan*:ExpectedVolume*|s/if (shard == 0) continue;//|units without a trainable parameter are not reduced
dist/residency.cpp|dist_unit_tests|Residency*|s/ranges::max_element/ranges::min_element/|the farthest next use gives way
dist/residency.cpp|dist_unit_tests|Residency*|s/upcoming\[static_cast<std::size_t>(block)\] = next_use\[t\];//|next uses move on
dist/residency.cpp|dist_unit_tests|Residency*|s/resident.erase(victim);//|an evicted block is gone
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/if (resident()) return;//|what is resident is not gathered again
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/device_.wait(Stream::Compute, full_.arrival);/;/|a read waits for the gather
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/check(leases_ > 0, /check(true, /|parameters are read under a lease
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/check(leases_ == 0, "{}: evicted/check(true, "{}: evicted/|a leased unit is not evicted
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/if (replicated()) return;  \/\/ it stays.*//|a replica is never given up
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/if (!replicated()) return evict();/if (!replicated()) return;/|copies are stale after an update
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/if (running_stays() \&\& reducing_) finish_reduction();.*//|the buffer that stays is not replaced in flight
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/running_->clear(device_);$/;/|gradients begin a step with zeros
dist/shard_unit.cpp|dist_sim_tests|ShardUnit*:ShardedOptimizer*|s/Strategy::None ? own_begin() : 0;/Strategy::None ? 0 : 0;/|a data parallel rank's part of the norm is its own
dist/optimizer.cpp|dist_sim_tests|ShardedOptimizer*|s/const float decay = decays ? /const float decay = true ? /|biases and gains do not decay
ckpt/block_runner.cpp|launcher_sim_tests|Recompute.Full*:Volume.OneMicro*|s/if (keep == Keep::Costly) .*$/;/|the last block is not rerun
ckpt/block_runner.cpp|launcher_sim_tests|Recompute.Full*:Volume.OneMicro*|s/: std::vector<ShardUnit::Lease>();/: acquire(Pass::Backward, acquired);/|what reads no parameter gathers none
ckpt/block_runner.cpp|launcher_sim_tests|Recompute.Full*:Volume.OneMicro*|s/Activations dx = tape->backward(/leases.clear(); for (auto* u : units_) u->evict(); leases = acquire(Pass::Backward, nullptr); Activations dx = tape->backward(/|a recompute never gathers a second time
ckpt/block_runner.cpp|launcher_sim_tests|Recompute.Full*:Volume.OneMicro*|s/for (ShardUnit\* unit : reduces) unit->reduce();/;/|gradients are reduced
TABLE
}

say() { printf '%-10s %-22s %s\n' "$@"; }
run_tests() { timeout "$limit" "$work/build/tests/$1" --gtest_brief=1 --gtest_filter="$2" >"$work/out" 2>&1; }

mkdir -p "$work/src"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf -) | tar -C "$work/src" -xf - || exit 1
cmake -S "$work/src" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1" -DREGATHER_WERROR=OFF >"$work/out" ||
  { cat "$work/out"; exit 1; }

wrong=0
trap 'rm -rf "$work/src"' EXIT  # a half-made mutant must not be taken for the sources
while read -r program filter; do
  cmake --build "$work/build" --target "$program" >"$work/out" 2>&1 || { tail -20 "$work/out"; exit 1; }
  run_tests "$program" "$filter" || { cat "$work/out"; echo "mutants: $program ($filter) fails without any change"; exit 1; }
done < <(mutants | grep -E -- "$pattern" | awk -F'|' '{print $2, $3}' | sort -u)

while IFS='|' read -r file program filter change rule; do
  cp "$root/$file" "$work/before"
  sed "$change" "$work/before" >"$work/src/$file"
  if cmp -s "$work/before" "$work/src/$file"; then
    verdict='NO CHANGE'
  elif ! cmake --build "$work/build" --target "$program" >"$work/out" 2>&1; then
    verdict='NO BUILD'
  elif run_tests "$program" "$filter"; then
    verdict=SURVIVED
  else
    verdict=killed
  fi
  cp "$work/before" "$work/src/$file"
  [[ $verdict == killed ]] || wrong=$((wrong + 1))
  say "$verdict" "$file" "$rule"
done < <(mutants | grep -E -- "$pattern")
((wrong == 0)) || { echo "mutants: $wrong not killed"; exit 1; }
