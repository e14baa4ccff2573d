"""The bytes and the seconds that a stage takes on a machine."""
