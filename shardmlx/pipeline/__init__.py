"""Schedules as data: actions, their order, what must hold for them, and how they look in time."""
