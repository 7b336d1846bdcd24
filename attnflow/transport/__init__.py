"""Wasserstein distances that carry their error: exact where exact exists, else certified from both sides."""

from .circle import circle_distance as circle_distance
from .interval import Interval as Interval
from .observable import w2_to as w2_to
from .observable import w2_to_subspace as w2_to_subspace
from .projected import circle_to_uniform as circle_to_uniform
from .projected import moment_bound as moment_bound
from .projected import quantisation as quantisation
from .projected import sampling_band as sampling_band
from .projected import to_atoms as to_atoms
from .projected import to_projection as to_projection
from .projected import to_uniform as to_uniform
from .soft import coupled as coupled
from .soft import sinkhorn_divergence as sinkhorn_divergence
from .soft import sinkhorn_interval as sinkhorn_interval
from .soft import two_atoms_distance as two_atoms_distance
from .wasserstein import w2 as w2
