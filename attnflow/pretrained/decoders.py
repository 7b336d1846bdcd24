"""Causal decoders that normalise before each block: GPT-2, and Llama with its kin."""

from collections.abc import Mapping

import numpy as np

from .blocks import ACTIVATIONS, Attention, FeedForward, Layer, Norm
from .files import Tensors
from .reader import DEEPEST, Architecture, Config, Reader, by_head, checked, choice, count, positive, width_of


def gpt2(config: Config, tensors: Tensors) -> Architecture:
    """GPT-2: norms before each block, causal, fused projections stored as (in, out)."""
    d, depth, heads = count(config, "n_embd"), count(config, "n_layer", most=DEEPEST), count(config, "n_head")
    m = count(config, "n_inner", 4 * d)
    vocabulary, positions = count(config, "vocab_size"), count(config, "n_positions")
    act = choice(config, "activation_function", ACTIVATIONS, "gelu_new")
    eps, k = positive(config, "layer_norm_epsilon", 1e-5), width_of(d, heads)
    base = k**-0.5 if config.get("scale_attn_weights", True) else 1.0

    def made(read: Reader) -> Architecture:
        def layer(number):
            at = f"h.{number}."
            fused = read(at + "attn.c_attn.weight", d, 3 * d).T.reshape(3, heads, k, d)
            bias = read(at + "attn.c_attn.bias", 3 * d).reshape(3, heads, k)
            attention = Attention(
                *fused,
                by_head(read(at + "attn.c_proj.weight", d, d).T, heads),
                *bias,
                read(at + "attn.c_proj.bias", d),
                scale=base / (number + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1),
                causal=True,
            )
            forward = FeedForward(
                up=read(at + "mlp.c_fc.weight", d, m).T,
                up_bias=read(at + "mlp.c_fc.bias", m),
                down=read(at + "mlp.c_proj.weight", m, d).T,
                down_bias=read(at + "mlp.c_proj.bias", d),
                activation=act,
            )
            return Layer(read.norm(at + "ln_1", d, eps), attention, read.norm(at + "ln_2", d, eps), forward)

        def embed(ids):
            word = read.raw("wte.weight", vocabulary, d)[ids]
            return np.asarray(word, np.float64) + read.raw("wpe.weight", positions, d)[: len(ids)]

        return Architecture(
            name="gpt2",
            dimension=d,
            heads=heads,
            width=k,
            depth=depth,
            post=False,
            centred=True,
            layer=layer,
            closing=lambda: read.norm("ln_f", d, eps),
            embed=embed,
            positions=positions,
            vocabulary=vocabulary,
        )

    reader = Reader(tensors, "h.0.attn.c_attn.weight")
    return checked(made(reader), made(reader.checked()))


def llama(config: Config, tensors: Tensors) -> Architecture:
    """Llama, Mistral, Qwen2: RMS norms before each block (the sphere of all dimensions), grouped queries, rotary positions."""
    d, depth, m = (
        count(config, "hidden_size"),
        count(config, "num_hidden_layers", most=DEEPEST),
        count(config, "intermediate_size"),
    )
    heads = count(config, "num_attention_heads")
    groups = count(config, "num_key_value_heads", heads)
    k = count(config, "head_dim") if config.get("head_dim") else width_of(d, heads)
    vocabulary, positions = count(config, "vocab_size"), count(config, "max_position_embeddings", 2048)
    if config.get("sliding_window"):
        positions = min(positions, count(config, "sliding_window"))  # within the window all keys are seen
    act = choice(config, "hidden_act", ACTIVATIONS, "silu")
    eps = positive(config, "rms_norm_eps", 1e-6)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": str(rope)}
    theta = positive({"rope_theta": 10000.0, **config, **rope}, "rope_theta", 10000.0)
    form = rope.get("rope_type", rope.get("type", "default"))
    if heads % groups:
        raise ValueError(f"The configuration has {heads} query heads for {groups} key heads, which do not divide them.")

    def made(read: Reader) -> Architecture:
        def norm(name):
            return Norm(read(f"{name}.weight", d), np.zeros(d), eps, centred=False)

        def layer(number):
            at = f"layers.{number}."
            wq, bq = read.heads(at + "self_attn.q_proj", heads, k, d, bias=False)
            (wk, bk), (wv, bv) = (read.heads(at + f"self_attn.{part}_proj", groups, k, d, bias=False) for part in "kv")
            wk, bk, wv, bv = (np.repeat(a, heads // groups, axis=0) for a in (wk, bk, wv, bv))
            out = at + "self_attn.o_proj"
            attention = Attention(
                query=wq,
                key=wk,
                value=wv,
                output=by_head(read(out + ".weight", d, heads * k), heads),
                query_bias=bq,
                key_bias=bk,
                value_bias=bv,
                output_bias=read(out + ".bias", d) if read.has(out + ".bias") else np.zeros(d),
                scale=k**-0.5,
                causal=True,
                rotary=theta,
            )
            forward = FeedForward(
                up=read(at + "mlp.gate_proj.weight", m, d),
                up_bias=np.zeros(m),
                down=read(at + "mlp.down_proj.weight", d, m),
                down_bias=np.zeros(d),
                activation=act,
                gate=read(at + "mlp.up_proj.weight", m, d),
            )
            return Layer(norm(at + "input_layernorm"), attention, norm(at + "post_attention_layernorm"), forward)

        return Architecture(
            name=str(config["model_type"]),
            dimension=d,
            heads=heads,
            width=k,
            depth=depth,
            post=False,
            centred=False,
            layer=layer,
            closing=lambda: norm("norm"),
            embed=lambda ids: np.asarray(read.raw("embed_tokens.weight", vocabulary, d)[ids], np.float64),
            positions=positions,
            vocabulary=vocabulary,
            obstacle=None if form == "default" else f"its rotary positions are scaled ({form}), which is not known",
        )

    reader = Reader(tensors, "layers.0.self_attn.q_proj.weight")
    return checked(made(reader), made(reader.checked()))
