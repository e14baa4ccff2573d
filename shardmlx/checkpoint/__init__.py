"""Writing, finding, reading and exporting a run's state."""
