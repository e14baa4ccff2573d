"""A finished model: fused, converted, quantised, one module at a time."""
