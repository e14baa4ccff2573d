"""Holds one short file for each model family: all that differs between them."""
