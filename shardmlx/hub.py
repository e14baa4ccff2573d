"""Run ``shardmlx hub`` as ``python -m shardmlx.hub``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("hub")
