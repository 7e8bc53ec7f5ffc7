"""What was in memory, and when."""
