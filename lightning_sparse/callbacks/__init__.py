"""Thin Lightning callbacks that drive the parts and report."""
