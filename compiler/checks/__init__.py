"""Two plans of one step compared, and who is to blame for a difference."""
