"""Run ``shardmlx doctor`` as ``python -m shardmlx.doctor``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("doctor")
