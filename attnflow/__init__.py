"""The differentiable simulator of attention dynamics: tokens on the unit sphere, moved by attention heads."""

from . import claims as claims
from . import metastable as metastable
from . import observe as observe
from . import plots as plots
from . import pretrained as pretrained
from . import sphere as sphere
from . import theory as theory
from .attention import Exponential as Exponential
from .attention import Hardmax as Hardmax
from .attention import Linear as Linear
from .attention import ReLU as ReLU
from .attention import Softmax as Softmax
from .claims import Claim as Claim
from .dominance import fit_radial_dominance as fit_radial_dominance
from .field import AttentionField as AttentionField
from .field import ZeroTemperatureField as ZeroTemperatureField
from .fit import fit as fit
from .harmonics import Harmonics as Harmonics
from .heads import AlignedHeads as AlignedHeads
from .heads import FactoredHeads as FactoredHeads
from .heads import Heads as Heads
from .heads import ScalarHeads as ScalarHeads
from .metastable import merge_flow as merge_flow
from .noisy import diffuse as diffuse
from .normalization import NormalizedPush as NormalizedPush
from .normalization import PeriNorm as PeriNorm
from .normalization import PreNorm as PreNorm
from .points import grid as grid
from .solve import at_consensus as at_consensus
from .solve import at_rest as at_rest
from .solve import layers as layers
from .solve import solve as solve
from .sweep import sweep as sweep
from .trajectory import Status as Status
from .trajectory import Trajectory as Trajectory
from .transport import Interval as Interval
from .transport import w2 as w2

__version__ = "0.1.0"
