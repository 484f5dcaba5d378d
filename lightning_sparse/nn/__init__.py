"""Layers whose backward is sparse. One layer a file."""
