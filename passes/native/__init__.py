"""The planners' inner loops in C++, and the types that cross into them."""

from dyngran.passes.native.library import library

__all__ = ["library"]
