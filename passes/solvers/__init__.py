"""Solvers: each proposes sets of values to save; the simulator judges them."""
