"""Triton kernels, each with formula, reference and launcher; imports nothing else of dyngran."""
