"""Run ``shardmlx evaluate`` as ``python -m shardmlx.evaluate``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("evaluate")
