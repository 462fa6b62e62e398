"""Plan files: what they hold, and how one is applied to the graph at hand."""
