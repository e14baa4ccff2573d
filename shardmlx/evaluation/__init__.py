"""Measures a model through the pipeline: perplexity of texts, and tasks."""
