"""Pipeline-parallel fine-tuning of language models with MLX and MPI."""

__version__ = "0.1.0"
