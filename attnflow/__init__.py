"""The differentiable simulator of attention dynamics: tokens on the unit sphere, moved by attention heads."""

from . import observe as observe
from . import sphere as sphere
from . import theory as theory
from .attention import Exponential as Exponential
from .attention import Hardmax as Hardmax
from .attention import Linear as Linear
from .attention import ReLU as ReLU
from .attention import Softmax as Softmax
from .field import AttentionField as AttentionField
from .field import ZeroTemperatureField as ZeroTemperatureField
from .heads import AlignedHeads as AlignedHeads
from .heads import FactoredHeads as FactoredHeads
from .heads import Heads as Heads
from .heads import ScalarHeads as ScalarHeads
from .solve import at_consensus as at_consensus
from .solve import at_rest as at_rest
from .solve import layers as layers
from .solve import solve as solve
from .trajectory import Status as Status
from .trajectory import Trajectory as Trajectory

__version__ = "0.1.0"
