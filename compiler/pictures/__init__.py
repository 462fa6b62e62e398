"""A plan as people look at it: terminal, page, picture, trace, snapshot."""
