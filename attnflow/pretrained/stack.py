"""A trained network as a stack of layers: its exact passes, its heads on the sphere, and its flow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..reduce import AbstractReduction
from ..solve import solve
from .blocks import FoldedAttention, FoldedFeedForward, Layer, Norm, centre, fold_attention, fold_feed_forward
from .files import MEBIBYTE, regular_file
from .flow import Affine, FeedForwardBlock, FoldedHeads, PretrainedField
from .reader import Architecture

Array = np.ndarray


class Passes(NamedTuple):
    """What the exact network does to tokens: the residual before each layer and after the last, and between the blocks."""

    residual: Float[Array, "L1 n d"]
    middle: Float[Array, "L n d"]
    output: Float[Array, "n d"]
    centred: bool

    @property
    def tokens(self) -> Float[Array, "L1 n d"]:
        """Tokens on the sphere entering each layer, and after the last."""
        return self._direction(self.residual)

    @property
    def middle_tokens(self) -> Float[Array, "L n d"]:
        """Tokens on the sphere between attention and feed-forward block."""
        return self._direction(self.middle)

    @property
    def radius(self) -> Float[Array, "L1 n"]:
        """Length of the residual that the norms divide by."""
        return np.linalg.norm(centre(self.residual) if self.centred else self.residual, axis=-1)

    def _direction(self, r):
        c = centre(r) if self.centred else r
        return c / np.linalg.norm(c, axis=-1, keepdims=True)


class WeightStack:
    r"""A trained network read from local files; layers are read when used, in float64.

    `embed(ids)` gives the residual that enters the first layer, `layers(x0)` passes it through the exact network, and
    `field()` is the flow on the sphere that the layers discretise (`blocks.py` has the algebra).
    """

    def __init__(self, architecture: Architecture, tokenizer: Path | None = None):
        self.architecture = architecture
        self._tokenizer = tokenizer

    def __repr__(self):
        a = self.architecture
        order = "norm after each block" if a.post else "norm before each block"
        shared = ", one shared layer" if a.shared else ""
        return (
            f"WeightStack({a.name}: L = {a.depth}{shared}, H = {a.heads}, d = {a.dimension}, d_k = {a.width}, {order})"
        )

    def __len__(self):
        return self.architecture.depth

    @property
    def shared(self) -> bool:
        """Whether every layer has the same weights: the flow is then autonomous."""
        return self.architecture.shared

    def layer(self, number: int) -> Layer:
        """The blocks of a layer as stored."""
        if not 0 <= number < len(self):
            raise ValueError(f"`layer` must lie in 0..{len(self) - 1}, got {number}.")
        return self.architecture.layer(number)

    def norm(self, number: int) -> Norm:
        """The norm through which the heads of a layer read; for ALBERT's first pass, which has none, that of the others."""
        found = self.layer(number).attention_norm or (self.architecture.closing() if self.architecture.post else None)
        if found is None:
            raise ValueError(f"Layer {number} reads its residual without a norm: it has no form on the sphere.")
        return found

    def folded(self, number: int) -> tuple[FoldedAttention, FoldedFeedForward | None]:
        """The blocks of a layer in sphere coordinates, heads factored."""
        layer, post = self.layer(number), self.architecture.post
        heads = fold_attention(layer.attention, self.norm(number), post=post)
        if layer.feed_forward is None or layer.feed_forward_norm is None:
            return heads, None
        return heads, fold_feed_forward(layer.feed_forward, layer.feed_forward_norm, post=post)

    def tokenize(self, text: str) -> Int[Array, " n"]:
        """Token ids of a text by the folder's tokenizer.json; needs the package `tokenizers`.

        **Errors:** ValueError where the folder has none or the package is missing.
        """
        if self._tokenizer is None:
            raise ValueError("The model folder has no tokenizer.json; pass token ids to `embed` instead.")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("Texts need the package `tokenizers`: pip install 'attnflow[text]'.") from None
        try:
            tokenizer = Tokenizer.from_str(regular_file(self._tokenizer, 64 * MEBIBYTE).read_text(encoding="utf-8"))
        except Exception as problem:  # the parser raises plain exceptions
            raise ValueError(f"{self._tokenizer} is not a tokenizer: {problem}.") from None
        tokenizer.no_padding()
        if self.architecture.positions is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(self.architecture.positions)
        return np.asarray(tokenizer.encode(text).ids, np.int64)

    def embed(self, ids: Array | Sequence[Any]) -> Float[Array, "n d"]:
        """The residual that enters the first layer.

        **Errors:** ValueError where an id is not in the vocabulary or the text is longer than the positions.
        """
        ids, a = np.asarray(ids), self.architecture
        if a.embed is None:
            raise ValueError("This stack was made without embeddings; start from tokens.")
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"`ids` must be a non-empty list of integers, got {ids.dtype} of shape {ids.shape}.")
        if ids.min() < 0 or (a.vocabulary is not None and ids.max() >= a.vocabulary):
            raise ValueError(f"`ids` must lie in 0..{a.vocabulary} - 1, got {ids.min()}..{ids.max()}.")
        if a.positions is not None and ids.size > a.positions:
            raise ValueError(f"The model has {a.positions} positions, got {ids.size} tokens.")
        return np.asarray(a.embed(ids), np.float64)

    def layers(self, x0: Float[Array, "n d"]) -> Passes:
        """The exact discrete network on a residual x0 (n, d), as from `embed`; dropout off.

        After-norm networks do not feel the length of x0, so tokens of the sphere will do.
        """
        a, r = self.architecture, np.asarray(x0, np.float64)
        if r.ndim != 2 or r.shape[1] != a.dimension:
            raise ValueError(f"`x0` must have shape (n, {a.dimension}), got {r.shape}.")
        if a.obstacle is not None:
            raise ValueError(f"The network cannot be run: {a.obstacle}.")
        residual, middle = [r], []
        for number in range(a.depth):
            layer = self.layer(number)
            r = _step(r, layer.attention_norm, layer.attention, a.post)
            middle.append(r)
            if layer.feed_forward is not None:
                r = _step(r, layer.feed_forward_norm, layer.feed_forward, a.post)
            residual.append(r)
        closing = a.closing()
        return Passes(np.stack(residual), np.stack(middle), r if closing is None else closing(r), a.centred)

    def field(
        self,
        layers: int | Sequence[int] | None = None,
        *,
        feed_forward: Literal["split", "joint"] | None = None,
        clock: Literal["layer", "residual-norm"] = "layer",
        radius: Float[Array, "L1 n"] | None = None,
        affine: bool = True,
        causal: bool | None = None,
        rotary: Literal["refuse", "ignore"] = "refuse",
        reduction: AbstractReduction | None = None,
    ) -> PretrainedField:
        r"""The flow of the network, or of some `layers` (one number: an autonomous field).

        **Arguments:**

        - `feed_forward`: None for attention only; "split" lets it act after the heads within each layer, "joint" with them.
        - `clock`: "layer" counts layers. The state is tokens of the sphere after-norm; before-norm it is the residual
          stream, whose length is carried along. "residual-norm" (before-norm) is the sphere with $\dot u = P f(u)$, the
          papers' clock $ds = dt/|r|$: layer l lasts the mean of $1/|r_l|$ over tokens, from `radius` of `layers(x0)`;
          a single layer needs none and lasts for ever.
        - `affine`: False drops key bias, constant and linear drift and leaves the papers' model.
        - `causal`: None as trained.
        - `rotary`: rotary positions make the score depend on i - j and are not folded; "ignore" takes the score at i = j.
        - `reduction`: as for `AttentionField`.
        """
        a = self.architecture
        wanted = list(range(len(self))) if layers is None else [layers] if isinstance(layers, int) else list(layers)
        if layers is None and self.shared:
            wanted = [0]
        if not wanted:
            raise ValueError("`layers` must name at least one layer.")
        residual = not a.post and clock == "layer"
        if clock == "residual-norm" and a.post:
            raise ValueError("After-norm networks have |r| = sqrt(d) at every layer: use `clock` = 'layer'.")
        if self.layer(wanted[0]).attention.rotary is not None and rotary != "ignore":
            raise ValueError("Rotary positions are not folded; `rotary` = 'ignore' takes the score at equal positions.")
        parts = [self.folded(number) for number in wanted]
        if feed_forward is not None and any(forward is None for _, forward in parts):
            raise ValueError("`feed_forward` needs a feed-forward block in every layer.")
        heads = [heads for heads, _ in parts]
        forward = [forward for _, forward in parts if forward is not None] if feed_forward is not None else []
        lengths = np.ones(len(self) if layers is None else len(wanted))
        if clock == "residual-norm" and len(wanted) > 1:
            if radius is None or np.shape(radius)[0] <= max(wanted):
                raise ValueError(
                    "`clock` = 'residual-norm' over several layers needs `radius` (L + 1, n) of `layers(x0)`."
                )
            lengths = np.mean(1 / np.asarray(radius), axis=1)[wanted]

        def stacked(items, name):
            values = [getattr(item, name) for item in items]
            return None if values[0] is None else jnp.asarray(np.stack(values), jnp.result_type(float))

        def affine_part(items):
            return Affine(*(stacked(items, name) if affine else None for name in ("constant", "linear")))

        factors = [stacked(heads, name) for name in ("query", "key", "value", "output")]
        bias = stacked(heads, "query_bias") if affine else None
        block = None
        if forward:
            names = ("up", "up_bias", "gate", "gate_bias", "down")
            block = FeedForwardBlock(*(stacked(forward, name) for name in names), forward[0].activation)
        return PretrainedField(
            heads=eqx.filter_vmap(FoldedHeads)(*factors, bias),
            drift=affine_part(heads),
            feed_forward=block,
            feed_forward_drift=affine_part(forward) if forward else None,
            switches=jnp.asarray(np.concatenate([[0.0], np.cumsum(lengths)]), jnp.result_type(float)),
            eps=jnp.asarray(self.norm(wanted[0]).eps, jnp.result_type(float)),
            causal=self.layer(wanted[0]).attention.causal if causal is None else causal,
            centred=a.centred,
            residual=residual,
            split=feed_forward == "split",
            reduction=reduction,
        )

    def discretisation_gap(
        self, x0: Float[Array, "n d"], *, feed_forward: bool = True, rtol: float = 1e-4, max_steps: int = 4096
    ) -> "Gap":
        """How far one layer is from the flow of unit time with its weights, for every layer, from where the network is.

        With `feed_forward` the split flow is compared with the whole layer, else that of the heads with the attention
        block. ALBERT's first pass, which has no norm, is compared with the flow of the others.

        **Errors:** RuntimeError where a flow does not finish in `max_steps`.
        """
        passes = self.layers(x0)
        start, end = passes.tokens[:-1], passes.tokens[1:] if feed_forward else passes.middle_tokens
        error = []
        for number in range(len(self)):
            field = self.field(number, feed_forward="split" if feed_forward else None)
            state = passes.residual[number] if field.residual else start[number]
            run = solve(
                field,
                jnp.asarray(state, field.switches.dtype),
                field.switches,
                controller=field.controller(rtol, rtol / 100),
                max_steps=max_steps,
            )
            error.append(_angle(np.asarray(field.directions(run.final)), end[number]))
        return Gap(np.array(error), np.array([_angle(a, b) for a, b in zip(start, end, strict=True)]))


class Gap(NamedTuple):
    """Mean angle over tokens, in degrees and by layer, between flow and network (`error`) and turned by it (`turn`)."""

    error: Float[Array, " L"]
    turn: Float[Array, " L"]

    @property
    def ratio(self) -> Float[Array, " L"]:
        """error / turn: 0 where the layer is its flow."""
        return self.error / self.turn


def _angle(u: Array, v: Array) -> float:
    """Mean angle between the rows, in degrees."""
    u, v = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (u, v))
    half = np.arctan2(np.linalg.norm(u - v, axis=-1), np.linalg.norm(u + v, axis=-1))
    return float(np.degrees(2 * half).mean())


def _step(r: Array, norm: Norm | None, block, post: bool) -> Array:
    """Residual after a block: the block reads through its norm; after-norm networks also keep what they read."""
    x = r if norm is None else norm(r)
    return (x if post else r) + block(x)
