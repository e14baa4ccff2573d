"""What a model family looks like, and how a stage is cut out of it."""
