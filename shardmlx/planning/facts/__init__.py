"""The facts of a plan: machines, links, times that were measured, and the work."""
