"""Run ``shardmlx launch`` as ``python -m shardmlx.launch``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("launch")
