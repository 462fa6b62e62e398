"""Decisions and pure graph transforms: problem, plan, lifetimes, costs, simulator, solvers, rewriters."""
