"""GPT-2 and Llama in plain PyTorch, one process, standard operations only. Names and shapes are those of model/*.h."""
import math

import torch
import torch.nn.functional as F

import recipe


def parameter_table(m):
    """[(name, shape, init)] with init 'zeros', 'ones' or a standard deviation."""
    c, v, t, layers = m["hidden"], m["vocab"], m["max_sequence"], m["layers"]
    std, residual = m["init_std"], float(torch.tensor(m["init_std"]) / torch.sqrt(torch.tensor(2.0 * layers)))
    table = []
    if m["type"] == "gpt2":
        f = m.get("ffn_hidden") or 4 * c
        table += [("wte.weight", (v, c), std), ("wpe.weight", (t, c), std)]
        for i in range(layers):
            h = f"h.{i}."
            table += [
                (h + "ln_1.weight", (c,), "ones"), (h + "ln_1.bias", (c,), "zeros"),
                (h + "attn.c_attn.weight", (3 * c, c), std), (h + "attn.c_attn.bias", (3 * c,), "zeros"),
                (h + "attn.c_proj.weight", (c, c), residual), (h + "attn.c_proj.bias", (c,), "zeros"),
                (h + "ln_2.weight", (c,), "ones"), (h + "ln_2.bias", (c,), "zeros"),
                (h + "mlp.c_fc.weight", (f, c), std), (h + "mlp.c_fc.bias", (f,), "zeros"),
                (h + "mlp.c_proj.weight", (c, f), residual), (h + "mlp.c_proj.bias", (c,), "zeros"),
            ]
        table += [("ln_f.weight", (c,), "ones"), ("ln_f.bias", (c,), "zeros")]
    else:
        d = c // m["heads"]
        kv = m.get("kv_heads") or m["heads"]
        f = m.get("ffn_hidden") or (8 * c // 3 + 63) // 64 * 64
        table += [("model.embed_tokens.weight", (v, c), std)]
        for i in range(layers):
            h = f"model.layers.{i}."
            table += [
                (h + "input_layernorm.weight", (c,), "ones"),
                (h + "self_attn.qkv_proj.weight", ((m["heads"] + 2 * kv) * d, c), std),
                (h + "self_attn.o_proj.weight", (c, c), residual),
                (h + "post_attention_layernorm.weight", (c,), "ones"),
                (h + "mlp.gate_proj.weight", (f, c), std),
                (h + "mlp.up_proj.weight", (f, c), std),
                (h + "mlp.down_proj.weight", (c, f), residual),
            ]
        table += [("model.norm.weight", (c,), "ones")]
    if not m["tie_embeddings"]:
        table += [("lm_head.weight", (v, c), std)]
    return table


def start_values(m, seed, dtype):
    values = {}
    for name, shape, init in parameter_table(m):
        if init == "zeros":
            value = torch.zeros(shape)
        elif init == "ones":
            value = torch.ones(shape)
        else:
            value = torch.from_numpy(recipe.normal(name, shape, seed, init))
        values[name] = value.to(dtype).requires_grad_()
    return values


def split_heads(x, heads):
    b, t, c = x.shape
    return x.view(b, t, heads, c // heads).transpose(1, 2)  # [B, H, T, D]


def causal_attention(q, k, v):
    t, d = q.shape[-2:]
    score = q @ k.transpose(-2, -1) / math.sqrt(d)
    score = score.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
    y = torch.softmax(score, dim=-1) @ v
    b, h, _, _ = y.shape
    return y.transpose(1, 2).reshape(b, t, h * d)


def gpt2(m, p, tokens):
    """Logits [B, T, V]."""
    c, heads = m["hidden"], m["heads"]
    x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]

    def norm(x, name):
        return F.layer_norm(x, (c,), p[name + ".weight"], p[name + ".bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, p[name + ".weight"], p[name + ".bias"])

    for i in range(m["layers"]):
        h = f"h.{i}."
        q, k, v = (split_heads(s, heads) for s in linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(c, dim=-1))
        x = x + linear(causal_attention(q, k, v), h + "attn.c_proj")
        up = F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh")
        x = x + linear(up, h + "mlp.c_proj")
    return F.linear(norm(x, "ln_f"), p["wte.weight" if m["tie_embeddings"] else "lm_head.weight"])


def rotate(x, theta):
    """Rotary positions; element i of a head turns with element i + D/2. x: [B, H, T, D]."""
    t, d = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(t, dtype=torch.float64)[:, None] * frequency
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def llama(m, p, tokens):
    """Logits [B, T, V]."""
    heads, kv = m["heads"], m.get("kv_heads") or m["heads"]
    d = m["hidden"] // heads
    x = p["model.embed_tokens.weight"][tokens]

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * p[name + ".weight"]

    for i in range(m["layers"]):
        h = f"model.layers.{i}."
        qkv = F.linear(norm(x, h + "input_layernorm"), p[h + "self_attn.qkv_proj.weight"])
        q, k, v = qkv.split([heads * d, kv * d, kv * d], dim=-1)
        q, k = rotate(split_heads(q, heads), m["rope_theta"]), rotate(split_heads(k, kv), m["rope_theta"])
        k, v = (s.repeat_interleave(heads // kv, dim=1) for s in (k, split_heads(v, kv)))
        x = x + F.linear(causal_attention(q, k, v), p[h + "self_attn.o_proj.weight"])
        n = norm(x, h + "post_attention_layernorm")
        up = F.silu(F.linear(n, p[h + "mlp.gate_proj.weight"])) * F.linear(n, p[h + "mlp.up_proj.weight"])
        x = x + F.linear(up, p[h + "mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm"), p["model.embed_tokens.weight" if m["tie_embeddings"] else "lm_head.weight"])


MODELS = {"gpt2": gpt2, "llama": llama}
