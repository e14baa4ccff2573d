"""What each technique of distributed training costs and gains on two to four Macs, by formulas."""

from __future__ import annotations

import time

from scripts.bench.benchmark import Bench, Benchmark

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
    """Return the time of messages with so many bytes in all."""
    bandwidth, latency = LINKS[link]
    return nbytes / bandwidth + messages * latency


def sum_bytes(nbytes: float, n: int) -> float:
    """Return the bytes that a replica sends to sum so many: the bandwidth bound of a ring."""
    return 2 * (n - 1) / n * nbytes


def amdahl(speedup: float, n: int) -> float:
    """Return the share of one machine's time that does not get shorter with ``n``."""
    return (n / speedup - 1) / (n - 1)


def of_more(serial: float, n: int) -> float:
    """Return the speed-up by ``n`` machines."""
    return 1 / (serial + (1 - serial) / n)


MEASURED = {"the blog's Macs": 4259.40 / 2610.67, "two replicas": 1.95, "two stages": 1.87}
"""Speed-ups by two machines."""


def speedups() -> dict[str, str]:
    """Return the cells of the page's table for ``MEASURED``: with 2, the share, with 4 and 8."""
    found = {}
    for name, speedup in MEASURED.items():
        serial = amdahl(speedup, 2)
        four, eight = (f"{of_more(serial, n):.2f}" for n in (4, 8))
        found[name] = f"{speedup:.2f} | {serial:.1%} | {four} | {eight}"
    return found


def costs() -> dict[str, list[str]]:
    """Return the seconds of techniques, over each of ``LINKS``, as the page writes them."""
    hidden = TOKENS * HIDDEN * BF16
    tensor = 4 * LAYERS * sum_bytes(hidden, 2)
    weights = PARAMETERS * FP32
    # Bytes, and messages.
    sent: dict[str, list[tuple[float, int]]] = {
        "pipeline": [(2 * hidden, 2)],
        "data parallel": [(sum_bytes(LORA * FP32, 2), 1), (sum_bytes(weights, 2), 1)],
        "tensor": [(tensor, 4 * LAYERS), (0, 2 * LAYERS)],  # the second: a token of decode
        "parameter sharding": [(PARAMETERS * BF16, 2 * LAYERS)],
        "gradient compression": [(sum_bytes(PARAMETERS, 2), 1), (sum_bytes(weights, 2), 1)],
        "parameter server": [(2 * 4 * weights, 1)],
        "local SGD": [(sum_bytes(weights, 2) / 50, 1)],
        "sequence parallel": [(2 * LAYERS * TOKENS * KV * BF16, 2 * LAYERS)],
    }
    return {
        technique: [
            " / ".join(shown(seconds(nbytes, link, messages)) for link in LINKS)
            for nbytes, messages in of_technique
        ]
        for technique, of_technique in sent.items()
    }


def shown(seconds: float) -> str:
    """Return a time as the page writes it."""
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 20 else 0}f} s"


def int8_bytes_a_second() -> float:
    """Return how fast this machine rounds gradients."""
    import mlx.core as mx

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


def which_parallelism(bench: Bench) -> None:
    """What each technique of distributed training costs and gains on two to four Macs, by formulas.

    The figures of docs/which-parallelism.md, for Mistral-7B on Macs with an M1 Pro. One is
    measured: how fast this machine rounds gradients to 8 bits. Takes some seconds.
    """
    row = TOKENS * 6 * PARAMETERS / FLOPS  # forward and backward of all weights
    lora_row = TOKENS * 4 * PARAMETERS / FLOPS  # no gradients of frozen weights
    facts = [
        ("a sequence, full", f"{row:.1f} s"),
        ("a sequence, LoRA", f"at most {lora_row:.1f} s"),
        ("LoRA", f"{LORA / 1e6:.2f}M parameters, {LORA * FP32 / 1e6:.0f} MB of gradients"),
        ("full", f"{PARAMETERS * FP32 / 1e9:.0f} GB"),
        ("rounding to int8 here", f"{int8_bytes_a_second() / 1e9:.2f} GB/s"),
    ]
    facts += [
        (f"bubble of 1F1B, {p} stages, {m} micro-batches", f"{(p - 1) / (m + p - 1):.0%}")
        for p, m in ((2, 8), (4, 8), (4, 16))
    ]
    bench.show("Compute and sizes", ("what", ""), facts)
    rows = [(name, *cells.split(" | ")) for name, cells in speedups().items()]
    header = ("speed-up", "with 2", "share that does not shrink", "with 4", "with 8")
    bench.show("Amdahl", header, rows)
    lines = [(technique, "; ".join(times)) for technique, times in costs().items()]
    bench.show(f"Seconds over {' / '.join(LINKS)}", ("technique", ""), lines)


WHICH_PARALLELISM = Benchmark("which-parallelism", which_parallelism)
