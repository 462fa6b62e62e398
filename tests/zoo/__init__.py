"""The zoo: one training step of hundreds of public architectures, plainly and under dyngran."""
