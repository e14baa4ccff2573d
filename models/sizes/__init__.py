"""Sizes of a model and of its layers, read from its config.json or from mlx-lm's code of it."""
