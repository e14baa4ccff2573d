"""Run ``shardmlx train`` as ``python -m shardmlx.train``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("train")
