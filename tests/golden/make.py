#!/usr/bin/env python3
"""Trains the reference models in plain PyTorch and writes what they did: make.py [NAME]... (see README.md)."""
import argparse
import hashlib
import json
import math
import pathlib

import torch

import models
import recipe

HERE = pathlib.Path(__file__).resolve().parent

SMALL_TRAIN = {
    "steps": 5, "global_batch": 8, "sequence": 16, "seed": 1, "lr": 1e-3, "min_lr": 1e-4, "warmup": 2,
    "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0,
}


def small(kind, tied, **more):
    model = {"type": kind, "layers": 4, "hidden": 32, "heads": 2, "vocab": 257, "max_sequence": 16, "init_std": 0.2,
             "tie_embeddings": tied, **more}
    return {"dtype": "float64", "model": model, "train": SMALL_TRAIN}


# Small models in float64, which is what fp32 should approach; the quickstart as it runs, in float32.
CASES = {
    "gpt2": small("gpt2", True),
    "gpt2_untied": small("gpt2", False),
    "llama": small("llama", False, heads=4, kv_heads=2, rope_theta=10000.0),
    "llama_tied": small("llama", True, heads=4, kv_heads=1, rope_theta=100.0),
    "quickstart": {
        "dtype": "float32",
        "model": {"type": "gpt2", "layers": 6, "hidden": 384, "heads": 6, "vocab": 256, "max_sequence": 256,
                  "init_std": 0.02, "tie_embeddings": True},
        "train": {"steps": 50, "global_batch": 8, "sequence": 256, "seed": 1, "lr": 3e-4, "min_lr": 3e-5, "warmup": 10,
                  "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0},
    },
}


def summary(tensor, count=48):
    """A tensor in few numbers: norm, largest magnitude, and elements at a fixed stride of the flattened tensor."""
    flat = tensor.detach().double().reshape(-1)
    stride = max(1, flat.numel() // count)
    return {"shape": list(tensor.shape), "norm": flat.norm().item(), "max_abs": flat.abs().max().item(), "stride": stride,
            "elements": [float(f"{x:.9g}") for x in flat[::stride].tolist()]}


class AdamW:
    """Decoupled weight decay (matrices only), bias correction, gradients clipped to a global norm."""

    def __init__(self, parameters, train):
        self.p, self.t = parameters, train
        self.m = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.v = {n: torch.zeros_like(p) for n, p in parameters.items()}

    def step(self, step, lr, norm):
        scale = min(1.0, self.t["clip"] / norm)
        b1, b2 = self.t["betas"]
        with torch.no_grad():
            for name, p in self.p.items():
                g = p.grad * scale
                self.m[name].mul_(b1).add_(g, alpha=1 - b1)
                self.v[name].mul_(b2).addcmul_(g, g, value=1 - b2)
                if p.dim() == 2:
                    p.mul_(1 - lr * self.t["weight_decay"])
                denominator = (self.v[name] / (1 - b2**step)).sqrt_().add_(self.t["eps"])
                p.addcdiv_(self.m[name], denominator, value=-lr / (1 - b1**step))


def run(case, text, steps):
    m, t, dtype = case["model"], case["train"], getattr(torch, case["dtype"])
    data = recipe.Data(text, t["sequence"], t["seed"])
    parameters = models.start_values(m, t["seed"], dtype)
    first = {name: [float(x) for x in p.detach().float().reshape(-1)[:4]] for name, p in parameters.items()}
    optimizer = AdamW(parameters, t)
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        tokens, targets = (torch.from_numpy(a) for a in data.batch(step - 1, t["global_batch"]))
        logits = models.MODELS[m["type"]](m, parameters, tokens)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, m["vocab"]), targets.reshape(-1))
        for p in parameters.values():
            p.grad = None
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in parameters.values()))
        if step == 1:
            gradients = {name: summary(p.grad) for name, p in parameters.items()}
        optimizer.step(step, recipe.learning_rate(step, t["steps"], t["lr"], t["min_lr"], t["warmup"]), norm)
        losses.append(loss.item())
        norms.append(norm)
        print(f"  step {step}: loss {losses[-1]:.7f}, gradient norm {norm:.7f}", flush=True)
    order = [data.window(g) for g in range(2 * data.windows + 3)] if data.windows < 1000 else [data.window(g) for g in range(64)]
    return {"loss": losses, "grad_norm": norms, "order": order, "start": first, "gradients": gradients}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; all if none")
    parser.add_argument("--dtype", help="another element type than the stored one, to see what rounding does")
    parser.add_argument("--steps", type=int, help="fewer steps of the same schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--print-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    text = (HERE / "text.txt").read_bytes()
    for name in arguments.names or CASES:
        case = dict(CASES[name], dtype=arguments.dtype or CASES[name]["dtype"])
        print(f"{name} ({case['dtype']})")
        result = run(case, text, arguments.steps or case["train"]["steps"])
        if name == "quickstart":
            del result["gradients"]
        if arguments.print_only:
            continue
        result = {"torch": torch.__version__.split("+")[0], "text_sha256": hashlib.sha256(text).hexdigest(), **case, **result}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
        (HERE / f"{name}.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    main()
