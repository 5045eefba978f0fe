"""Scores, metrics, tables, figures and pages: numbers and names, no model."""
