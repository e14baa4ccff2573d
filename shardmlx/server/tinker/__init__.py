"""Tinker's API: training loops of clients, over a service that carries out their requests."""
