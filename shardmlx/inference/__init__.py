"""Text through the pipeline, a token at a time."""
