"""The bytes that a stage and a rank take, in training and generation."""
