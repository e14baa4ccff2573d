"""Note when this process began to run Python: for a program whose first import this is."""

import time

BEGAN = time.time()
"""Seconds since the epoch."""
