"""Models, operators, steps and comparisons that several tests share."""
