"""Run ``shardmlx export`` as ``python -m shardmlx.export``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("export")
