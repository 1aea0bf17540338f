#!/usr/bin/env python3
"""A GPT-2 under PyTorch FSDP2 on CPUs with gloo: the reference of bench/compare_with_torch.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/torch_fsdp2.py --layers 6 --hidden 384 --heads 6 \\
        --vocab 256 --sequence 256 --micro-batch 8 --policy full --steps 5

Model, optimizer and step are those of `model/gpt2.h` and `regather train`: learned positions, pre-norm, tied table, AdamW with decay
of matrices only, the gradient's norm clipped to 1. One FSDP unit a block and one for the rest; checkpoints inside the units.
Policies: none; full; sac (selective: matrix products and attention are kept, the rest is computed again); compile:F (torch.compile
of each block with activation_memory_budget F). Rank 0 prints one JSON line: seconds of each step after the warm-up, tokens a
step, losses, and the bytes that the blocks have left for backward when the last one ends.
"""
import argparse
import functools
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT_BY_SAC = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
BLOCKS_END = "blocks_end"


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.c_fc, self.mlp_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, tokens, hidden = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(hidden, -1)
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(a.vocab, a.hidden), nn.Embedding(a.sequence, a.hidden)
        self.blocks = nn.ModuleList(Block(a.hidden, a.heads) for _ in range(a.layers))
        self.ln_f = nn.LayerNorm(a.hidden)
        self.head = nn.Linear(a.hidden, a.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        with torch.profiler.record_function(BLOCKS_END):
            pass
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def apply_policy(model, policy):
    name, _, budget = policy.partition(":")
    if name in ("full", "sac"):
        more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, KEPT_BY_SAC)} if name == "sac" else {}
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **more)
    elif name == "compile":
        import torch._functorch.config
        torch._functorch.config.activation_memory_budget = float(budget)
        for block in model.blocks:
            block.compile()
    elif name != "none":
        raise SystemExit(f"--policy {policy}: none, full, sac or compile:F")


def bytes_left_by_blocks(model, step):
    """What the allocator holds more at the end of the blocks than at the step's beginning, without gathered parameters."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gathered = step()
    events = profile.profiler.kineto_results.events()
    end = next(e.start_ns() for e in events if e.name() == BLOCKS_END)
    live = sum(e.nbytes() for e in events if e.name() == "[memory]" and e.start_ns() < end)
    return live - gathered


def gathered_bytes(model):
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups]
    return sum(t.untyped_storage().nbytes() for g in groups for p in g.fsdp_params for t in p.all_gather_outputs)


def main():
    p = argparse.ArgumentParser()
    for name in ("layers", "hidden", "heads", "vocab", "sequence", "micro-batch", "steps"):
        p.add_argument(f"--{name}", type=int, required=True)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--policy", required=True)
    a = p.parse_args()

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Gpt2(a)
    apply_policy(model, a.policy)
    mesh = dist.init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [q for q in model.parameters() if q.dim() > 1]
    vectors = [q for q in model.parameters() if q.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    seconds, losses = [], []

    def train(step):
        generator = torch.Generator().manual_seed(step * world + rank)
        text = torch.randint(0, a.vocab, (a.micro_batch, a.sequence + 1), generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        gathered = gathered_bytes(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        seconds.append(time.perf_counter() - begin)
        losses.append(total.item() / world)
        return gathered

    steps = a.warmup + a.steps
    for step in range(steps):
        train(step)
    left = bytes_left_by_blocks(model, lambda: train(steps))
    if rank == 0:
        print(json.dumps({"seconds": seconds[a.warmup:steps], "activations": left, "tokens": world * a.micro_batch * a.sequence, "loss": losses,
                          "torch": torch.__version__}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in order


if __name__ == "__main__":
    main()
