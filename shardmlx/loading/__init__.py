"""Gets each rank the tensors of its own stages."""
