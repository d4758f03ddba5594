"""What other libraries call; nothing of the core imports it."""
