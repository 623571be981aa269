"""What is slow: a start whose first step does not come, and ranks that the others wait for again and again."""
