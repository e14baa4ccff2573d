"""Describes model families, and cuts stages out of models."""
