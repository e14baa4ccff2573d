"""User files, words for people, and the process around Python: used by every part."""
