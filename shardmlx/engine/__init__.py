"""One rank executes its actions: stages, gradients, the optimizer, and what is measured of them."""
