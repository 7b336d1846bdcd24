"""Sums over a million tokens on the circle and on $S^2$: the reduction `Harmonics`."""

from .reduction import Harmonics, degree_for, pays_from, suits, truncation_error

__all__ = ["Harmonics", "degree_for", "pays_from", "suits", "truncation_error"]
