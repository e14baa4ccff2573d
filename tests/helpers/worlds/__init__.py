"""Rooms of the product in simulated worlds: the real code, with time, links, disks and processes
that a seed draws.

``simulation`` and ``disk`` are what all rooms need; each other module has a room's world, and the
invariants that hold in it. ``python -m tests.helpers.worlds`` plays as many worlds as one likes.
"""
