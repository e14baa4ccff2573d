"""Run ``shardmlx report`` as ``python -m shardmlx.report``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("report")
