"""The commands of `dyngran-plan`, one to a module: `add` declares its arguments, `run` does it and returns the exit code."""
