"""Run ``shardmlx inspect`` as ``python -m shardmlx.inspect``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("inspect")
