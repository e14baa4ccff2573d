"""A program's own training loop: its requests to the ranks, and how they are carried out."""
