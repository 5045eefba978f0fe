"""Strategies on the classic benchmarks of computer vision, small enough for any machine."""
