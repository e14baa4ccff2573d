"""Benchmarks: ``python -m scripts.bench --help`` lists them."""

import time

BEGAN = time.time()
"""When this process began to run a program of this folder, in seconds since the epoch."""
