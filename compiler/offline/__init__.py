"""Planning without a card: a target is traced in a process of its own, under tensors without data."""
