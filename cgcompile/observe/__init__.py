"""What was split, captured and replayed, as a person wants to see it."""
