"""Metastability to the end: merging, merge trees, the energy staircase and lifetimes at any beta."""

from .flow import merge_flow as merge_flow
from .flow import shifted_energy as shifted_energy
from .lifetimes import Lifetimes as Lifetimes
from .lifetimes import lifetimes as lifetimes
from .tree import Merge as Merge
from .tree import MergeTree as MergeTree
from .tree import Plateau as Plateau
