"""Measurements as Markdown tables."""
