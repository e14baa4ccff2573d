"""What a model on disk or on the hub consists of, read from headers alone."""
