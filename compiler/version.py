"""dyngran's version, for plan files and cache keys. The face shows it as ``dyngran.__version__``; pyproject.toml repeats it."""

VERSION = "0.1.0"
