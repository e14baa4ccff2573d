"""Ranks: their messages, what they agree on, how a lost one is found, and how a job ends."""
