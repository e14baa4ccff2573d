"""A plan, and a model, as text."""
