"""Closed forms of arXiv 2605.10931 and arXiv 2605.04279, and of what was derived to correct or sharpen them."""

from . import equiangular as equiangular
from . import laplace as laplace
from . import low_temperature as low_temperature
from . import multi_head as multi_head
from . import terminal as terminal
