"""What happens while training runs: observation of steps, memory and time."""
