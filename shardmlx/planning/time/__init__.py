"""The seconds that a stage, its messages and a step take."""
