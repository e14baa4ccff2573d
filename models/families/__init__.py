"""Families of models: a row for each ``model_type`` in the ``FAMILIES`` of the files here."""
