"""Benchmarks: ``python -m scripts.bench --help`` lists them."""
