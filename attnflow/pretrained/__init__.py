"""Heads of trained transformers from local files: load, diagnose, flow."""

from .diagnose import Diagnosis as Diagnosis
from .diagnose import diagnose as diagnose
from .diagnose import inspect as inspect
from .flow import PretrainedField as PretrainedField
from .load import from_arrays as from_arrays
from .load import from_huggingface as from_huggingface
from .load import from_onnx as from_onnx
from .load import from_safetensors as from_safetensors
from .load import load as load
from .stack import Gap as Gap
from .stack import Passes as Passes
from .stack import WeightStack as WeightStack
from .terminal import TerminalPhase as TerminalPhase
from .terminal import terminal_phase as terminal_phase
from .terminal import terminal_space as terminal_space
from .verdicts import Verdict as Verdict
