"""The version, readable without importing torch."""

__version__ = "0.1.0"
