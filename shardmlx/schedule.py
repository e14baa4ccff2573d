"""Run ``shardmlx schedule`` as ``python -m shardmlx.schedule``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("schedule")
