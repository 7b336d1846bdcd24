"""Opening a trained network: a model folder, one file, or arrays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float

from .architectures import build
from .blocks import Attention, Layer, Norm
from .files import inside, open_folder, read_bin, read_json, read_safetensors
from .reader import Architecture
from .stack import WeightStack

Array = np.ndarray


def load(path: str | Path, config: Mapping[str, object] | None = None) -> WeightStack:
    """A network from a model folder or from a .safetensors, .bin or .onnx file; see the function of each."""
    path = Path(path)
    if path.is_dir():
        return from_huggingface(path, config)
    if path.suffix == ".onnx":
        return from_onnx(path, config)
    return from_safetensors(path, config)


def from_huggingface(folder: str | Path, config: Mapping[str, object] | None = None) -> WeightStack:
    """A network from a local folder with config.json and its weights (safetensors or .bin, whole or in shards).

    tokenizer.json is used for texts where it is there. Nothing is fetched. `config` entries replace those of the file.

    **Errors:** ValueError where a file is missing or damaged, links out of the folder, or does not fit the configuration;
    where the architecture is unknown.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; names of models are not looked up anywhere.")
    settings = read_json(inside(folder, "config.json"), 2**20) | dict(config or {})
    tokenizer = inside(folder, "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    return WeightStack(build(settings, open_folder(folder)), tokenizer)


def from_safetensors(path: str | Path, config: Mapping[str, object] | None = None) -> WeightStack:
    """A network from one .safetensors (or .bin) file; `config` as in config.json, by default that file beside it."""
    path = Path(path)
    tensors = read_bin(path) if path.suffix == ".bin" else read_safetensors(path)
    return WeightStack(build(_settings(path, config), tensors), _beside(path, "tokenizer.json"))


def from_onnx(path: str | Path, config: Mapping[str, object] | None = None) -> WeightStack:
    """A network from an .onnx export, int8 weights dequantised; needs the extra `attnflow[onnx]` and `config` as above."""
    from .exported import read_onnx

    path = Path(path)
    return WeightStack(build(_settings(path, config), read_onnx(path)), _beside(path, "tokenizer.json"))


def _beside(path: Path, name: str) -> Path | None:
    return inside(path.parent, name) if (path.parent / name).exists() else None


def _settings(path: Path, config: Mapping[str, object] | None) -> Mapping[str, object]:
    if config is not None:
        return config
    found = _beside(path, "config.json")
    if found is None:
        raise ValueError(f"There is no config.json beside {path}; pass its entries as `config`.")
    return read_json(found, 2**20)


def from_arrays(
    query: Float[Array, "L H k d"],
    key: Float[Array, "L H k d"],
    value: Float[Array, "L H k d"],
    output: Float[Array, "L H d k"],
    *,
    order: Literal["pre", "post"] = "pre",
    centred: bool = True,
    causal: bool = False,
    scale: float | None = None,
    gain: Float[Array, "L d"] | None = None,
    bias: Float[Array, "L d"] | None = None,
    query_bias: Float[Array, "L H k"] | None = None,
    key_bias: Float[Array, "L H k"] | None = None,
    value_bias: Float[Array, "L H k"] | None = None,
    output_bias: Float[Array, "L d"] | None = None,
    eps: float = 0.0,
) -> WeightStack:
    r"""Attention-only layers of any model from arrays: projections as applied to the normed residual, by layer and head.

    `scale` of the score is $1/\sqrt k$ unless given; `gain` and `bias` are those of the norm in front of each layer (1 and
    0), the other biases 0. In `post` order a norm without gain closes the network. `centred` is layer norm, else RMS norm.
    One layer makes a shared stack, whose flow is autonomous.
    """
    depth, count, k, d = query.shape

    def part(a, number, *shape, fill=0.0):
        return np.full(shape, fill) if a is None else np.asarray(a[number], np.float64)

    def layer(number: int) -> Layer:
        attention = Attention(
            *(np.asarray(a[number], np.float64) for a in (query, key, value, output)),
            *(part(a, number, count, k) for a in (query_bias, key_bias, value_bias)),
            part(output_bias, number, d),
            scale=k**-0.5 if scale is None else scale,
            causal=causal,
        )
        return Layer(Norm(part(gain, number, d, fill=1.0), part(bias, number, d), eps, centred), attention)

    architecture = Architecture(
        name="arrays",
        dimension=d,
        heads=count,
        width=k,
        depth=depth,
        post=order == "post",
        centred=centred,
        layer=layer,
        closing=lambda: Norm(np.ones(d), np.zeros(d), eps, centred) if order == "post" else None,
        shared=depth == 1,
    )
    return WeightStack(architecture)
