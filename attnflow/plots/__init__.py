"""Pictures: functions of arrays and Axes, without LaTeX, in colours that colour-blind readers can tell apart."""

from .curves import bands as bands
from .curves import per_head as per_head
from .curves import phases as phases
from .curves import timeseries as timeseries
from .curves import work_precision as work_precision
from .maps import heat_map as heat_map
from .maps import layer_maps as layer_maps
from .maps import phase_diagram as phase_diagram
from .maps import spectrum as spectrum
from .merges import lifetimes as lifetimes
from .merges import merge_tree as merge_tree
from .merges import staircase as staircase
from .style import COLOURS as COLOURS
from .style import STYLE as STYLE
from .style import figure as figure
from .style import save as save
from .tokens import angles as angles
from .tokens import animate as animate
from .tokens import circle as circle
from .tokens import circle_density as circle_density
from .tokens import sphere as sphere
