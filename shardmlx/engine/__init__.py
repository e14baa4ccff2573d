"""Execute one rank's actions: stages, gradients, the optimizer, and what is measured of them."""
