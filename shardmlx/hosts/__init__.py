"""Machines from outside: whether they can run a job, and the mpirun that runs it."""
