"""Runs the layers of mlx-lm's models: slices, their attention, recurrences and adapters."""
