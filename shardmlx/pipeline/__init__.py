"""Schedules as data: actions, their order and invariants, and their times."""
