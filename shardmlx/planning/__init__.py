"""Chooses a layout and a schedule for given machines, by the bytes and seconds that they take."""
