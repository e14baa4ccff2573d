"""Run ``shardmlx profile`` as ``python -m shardmlx.profile``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("profile")
