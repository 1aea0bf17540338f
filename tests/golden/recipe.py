"""What Regather makes from a seed, made again in numpy: start values, the order of the data, the learning rate.

Written from the comments of tensor/init.cpp, launcher/data.h and the configuration's `schedule`, not from their code.
"""
import math

import numpy as np

MASK = (1 << 64) - 1
INIT_DOMAIN = 0x696E697469616C69
ORDER_DOMAIN = 0x77696E646F777321


def mix(h, word):
    h = ((h ^ word) + 0x9E3779B97F4A7C15) & MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def fnv1a64(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def philox(key, counters):
    """Philox4x32-10. key: 64 bits, low word first. counters: [n] of 64 bits, the low half of the counter. -> [n, 4] uint32."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    counters = np.asarray(counters, dtype=np.uint64)
    c = [counters & low, counters >> shift, np.zeros_like(counters), np.zeros_like(counters)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[0]
        b = np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> shift) ^ c[1] ^ np.uint64(k0), b & low, (a >> shift) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def normal(name, shape, seed, std):
    """Start value of a parameter with normal initialisation, float32."""
    n = math.prod(shape)
    words = philox(mix(mix(INIT_DOMAIN, seed), fnv1a64(name)), np.arange((n + 3) // 4)).astype(np.float64)
    a, b = words[:, 0::2], words[:, 1::2]
    r = np.sqrt(-2.0 * np.log((a + 0.5) * 2.0**-32))
    t = 2.0 * np.pi * (b * 2.0**-32)
    values = np.stack([r * np.cos(t), r * np.sin(t)], axis=2).reshape(-1)[:n]
    return (float(np.float32(std)) * values).astype(np.float32).reshape(shape)


def epoch_order(seed, epoch, windows):
    words = philox(mix(mix(ORDER_DOMAIN, seed), epoch), np.arange(windows)).astype(np.uint64)
    numbers = words[:, 0] | (words[:, 1] << np.uint64(32))
    return np.lexsort((np.arange(windows), numbers))


class Data:
    def __init__(self, text, sequence, seed):
        self.tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self.sequence, self.seed = sequence, seed
        self.windows = (len(self.tokens) - 1) // sequence

    def window(self, sample):
        return int(epoch_order(self.seed, sample // self.windows, self.windows)[sample % self.windows])

    def batch(self, step, size):
        """(tokens, targets), both [size, sequence], of the step's sequences in order; steps count from 0."""
        starts = [self.window(step * size + g) * self.sequence for g in range(size)]
        rows = np.stack([self.tokens[s : s + self.sequence + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]


def learning_rate(step, steps, lr, min_lr, warmup):
    """Steps count from 1. Linear to lr at step `warmup`, then half a cosine to min_lr at step `steps`."""
    if step <= warmup:
        return lr * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))
