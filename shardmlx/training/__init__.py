"""A fine-tuning run, from its options to what it leaves on disk."""
