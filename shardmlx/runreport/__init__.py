"""Shows a run from its metrics: as a page, live or in a file."""
