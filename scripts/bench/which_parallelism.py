"""What each technique of distributed training costs and gains on two to four Macs, by formulas.

    python scripts/bench/which_parallelism.py

Prints the figures of docs/which-parallelism.md, for Mistral-7B on Macs with an M1 Pro. One is
measured: how fast this machine rounds gradients to 8 bits. Takes some seconds.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx

LAYERS, HIDDEN, INNER, KV = 32, 4096, 14336, 1024
"""Mistral-7B: layers, widths of hidden state, of the feed-forward part, and of keys."""

PARAMETERS = 7.248e9
BF16, FP32 = 2, 4
TOKENS, ROWS = 1024, 8
"""Tokens of a sequence, and sequences of a batch."""

FLOPS = 0.6 * 5.2e12
"""An M1 Pro with 16 GPU cores, at the planner's 60%."""

LINKS = {"Thunderbolt": (2e9, 0.3e-3), "1 Gbit/s": (0.117e9, 0.3e-3)}
"""Bytes a second each way, and seconds of a message over TCP."""

RANK = 8
LORA = 16 * RANK * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + INNER))
"""Parameters of mlx-lm's LoRA on all matrices of 16 layers."""


def seconds(nbytes: float, link: str, messages: float = 1) -> float:
    bandwidth, latency = LINKS[link]
    return nbytes / bandwidth + messages * latency


def sum_bytes(nbytes: float, n: int) -> float:
    """Return the bytes that a replica sends to sum so many: the bandwidth bound of a ring."""
    return 2 * (n - 1) / n * nbytes


def amdahl(speedup: float, n: int) -> float:
    """Return the share of one machine's time that does not get shorter with ``n``."""
    return (n / speedup - 1) / (n - 1)


def of_more(serial: float, n: int) -> float:
    return 1 / (serial + (1 - serial) / n)


def int8_bytes_a_second() -> float:
    gradient = mx.random.normal((8 << 20,))
    mx.eval(gradient)
    fastest = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        groups = gradient.reshape(-1, 256)
        scale = mx.abs(groups).max(axis=1, keepdims=True) / 127
        mx.eval(mx.round(groups / scale).astype(mx.int8), scale)
        fastest = min(fastest, time.perf_counter() - began)
    return gradient.nbytes / fastest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    row = TOKENS * 6 * PARAMETERS / FLOPS  # forward and backward of all weights
    lora_row = TOKENS * 4 * PARAMETERS / FLOPS  # no gradients of frozen weights
    hidden = TOKENS * HIDDEN * BF16
    print(f"compute of a sequence: full {row:.1f} s, LoRA at most {lora_row:.1f} s")
    print(f"LoRA: {LORA / 1e6:.2f}M parameters, {LORA * FP32 / 1e6:.0f} MB of gradients; "
          f"full: {PARAMETERS * FP32 / 1e9:.0f} GB")  # fmt: skip
    print(f"hidden states of a sequence: {hidden / 1e6:.1f} MB")
    for name, speedup, n in (("the blog's two Macs", 4259.40 / 2610.67, 2),
                             ("two replicas here", 1.95, 2),
                             ("two stages here", 1.87, 2)):  # fmt: skip
        serial = amdahl(speedup, n)
        more = ", ".join(f"{count}: {of_more(serial, count):.2f} x" for count in (4, 8))
        print(f"Amdahl, {name}: {speedup:.2f} x, serial {serial:.1%}, then {more}")
    for p, m in ((2, 8), (4, 8), (4, 16)):
        print(f"bubble of 1F1B, {p} stages, {m} micro-batches: {(p - 1) / (m + p - 1):.0%}")
    for link in LINKS:
        print(f"\n{link}")
        tensor = 4 * LAYERS * sum_bytes(hidden, 2)
        gather = 2 * PARAMETERS * BF16 / 2
        figures = {
            "pipeline: hidden states and gradients of a sequence": seconds(2 * hidden, link, 2),
            "data parallel: sum of LoRA gradients": seconds(sum_bytes(LORA * FP32, 2), link),
            "data parallel: sum of all gradients": seconds(sum_bytes(PARAMETERS * FP32, 2), link),
            "tensor parallel: four sums a layer, a sequence": seconds(tensor, link, 4 * LAYERS),
            "tensor parallel: a token of decode": seconds(0, link, 2 * LAYERS),
            "parameter sharding: gather weights twice": seconds(gather, link, 2 * LAYERS),
            "sequence parallel: keys and values, a sequence": seconds(
                2 * LAYERS * TOKENS * KV * BF16, link, 2 * LAYERS
            ),
            "parameter server, 4 workers, all gradients": seconds(2 * 4 * PARAMETERS * FP32, link),
            "ring of 4, all gradients": seconds(sum_bytes(PARAMETERS * FP32, 4), link),
            "int8, all gradients, 2 replicas": seconds(sum_bytes(PARAMETERS, 2), link),
            "local SGD, H = 50, all gradients, a step": seconds(
                sum_bytes(PARAMETERS * FP32, 2) / 50, link
            ),
        }
        for what, time_taken in figures.items():
            print(f"{what:55} {time_taken:9.3f} s")
    print(f"\nrounding to int8 here: {int8_bytes_a_second() / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
