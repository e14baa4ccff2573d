"""The parts of a model on disk or on the hub, read from headers alone."""
