"""Speed measurements: scripts that print ratios and medians, not tests."""
