"""The architectures that are known, by the `model_type` of their configuration."""

from collections.abc import Callable

from .decoders import gpt2, llama
from .encoders import albert, bert, distilbert, roberta
from .files import Tensors
from .reader import Architecture, Config

KNOWN: dict[str, Callable[[Config, Tensors], Architecture]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "albert": albert,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
}


def build(config: Config, tensors: Tensors) -> Architecture:
    """The architecture that `config["model_type"]` names, every shape checked against the configuration.

    **Errors:** ValueError where the architecture is unknown, a tensor is missing or a shape does not fit.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KNOWN:
        raise ValueError(f"Unknown `model_type` {kind!r}; known are {', '.join(KNOWN)}. Use `from_arrays` for others.")
    return KNOWN[kind](config, tensors)
