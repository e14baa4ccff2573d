"""Run ``shardmlx generate`` as ``python -m shardmlx.generate``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("generate")
