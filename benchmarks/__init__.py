"""Measurements: attnflow against what its user would write otherwise, and against the machine itself."""
