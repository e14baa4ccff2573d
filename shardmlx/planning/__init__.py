"""Chooses a layout and a schedule for given machines."""
