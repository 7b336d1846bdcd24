"""Encoders that normalise after each block: BERT, RoBERTa, DistilBERT, and ALBERT, whose layers are all the same."""

from collections.abc import Mapping

import numpy as np

from .blocks import ACTIVATIONS, Attention, FeedForward, Layer
from .files import Tensors
from .reader import DEEPEST, Architecture, Config, Reader, by_head, checked, choice, count, positive, width_of


def _encoder(config: Config, tensors: Tensors, names: Mapping[str, str]) -> Architecture:
    """BERT and its kin: norms after each block, embeddings normalised before the first."""
    d, depth = count(config, names["d"]), count(config, names["depth"], most=DEEPEST)
    heads, m = count(config, names["heads"]), count(config, names["m"])
    vocabulary, positions = count(config, "vocab_size"), count(config, "max_position_embeddings")
    types = count(config, "type_vocab_size", 2)
    act = choice(config, names["act"], ACTIVATIONS, "gelu")
    eps = positive(config, "layer_norm_eps", 1e-12)
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise ValueError("Only encoders with absolute positions are known for this architecture.")
    # RoBERTa counts its positions from the padding index
    first = count(config, "pad_token_id", 1) + 1 if names["offset"] else 0

    def made(read: Reader) -> Architecture:
        def layer(number):
            at = names["layer"].format(number)
            (wq, bq), (wk, bk), (wv, bv) = (
                read.heads(at + names[part], heads, width_of(d, heads), d) for part in ("query", "key", "value")
            )
            attention = Attention(
                query=wq,
                key=wk,
                value=wv,
                output=by_head(read(at + names["output"] + ".weight", d, d), heads),
                query_bias=bq,
                key_bias=bk,
                value_bias=bv,
                output_bias=read(at + names["output"] + ".bias", d),
                scale=width_of(d, heads) ** -0.5,
            )
            forward = FeedForward(
                up=read(at + names["up"] + ".weight", m, d),
                up_bias=read(at + names["up"] + ".bias", m),
                down=read(at + names["down"] + ".weight", d, m),
                down_bias=read(at + names["down"] + ".bias", d),
                activation=act,
            )
            before = names["layer"].format(number - 1) + names["norm"] if number else "embeddings.LayerNorm"
            return Layer(read.norm(before, d, eps), attention, read.norm(at + names["middle"], d, eps), forward)

        def embed(ids):
            places = np.arange(first, first + len(ids))
            word = read.raw("embeddings.word_embeddings.weight", vocabulary, d)[ids]
            place = read.raw("embeddings.position_embeddings.weight", positions, d)[places]
            kind = read.raw("embeddings.token_type_embeddings.weight", types, d)[0] if names["types"] else 0
            return np.asarray(word, np.float64) + place + kind

        return Architecture(
            name=str(config["model_type"]),
            dimension=d,
            heads=heads,
            width=width_of(d, heads),
            depth=depth,
            post=True,
            centred=True,
            layer=layer,
            closing=lambda: read.norm(names["layer"].format(depth - 1) + names["norm"], d, eps),
            embed=embed,
            positions=positions - first,
            vocabulary=vocabulary,
        )

    reader = Reader(tensors, names["layer"].format(0) + names["query"] + ".weight")
    return checked(made(reader), made(reader.checked()))


_BERT = {
    "d": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "m": "intermediate_size",
    "act": "hidden_act",
    "layer": "encoder.layer.{}.",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "middle": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
    "types": "yes",
    "offset": "",
}
_DISTILBERT = {
    "d": "dim",
    "depth": "n_layers",
    "heads": "n_heads",
    "m": "hidden_dim",
    "act": "activation",
    "layer": "transformer.layer.{}.",
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "output": "attention.out_lin",
    "middle": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
    "types": "",
    "offset": "",
}


def bert(config, tensors):
    return _encoder(config, tensors, _BERT)


def roberta(config, tensors):
    return _encoder({"layer_norm_eps": 1e-5, **config}, tensors, _BERT | {"offset": "yes"})


def distilbert(config, tensors):
    return _encoder(config, tensors, _DISTILBERT)


def albert(config: Config, tensors: Tensors) -> Architecture:
    """ALBERT: norms after each block, the layers of a group all the same, the first pass on embeddings not normalised."""
    d, m = count(config, "hidden_size"), count(config, "intermediate_size")
    e, heads = count(config, "embedding_size", 128), count(config, "num_attention_heads")
    layers, groups = count(config, "num_hidden_layers", most=DEEPEST), count(config, "num_hidden_groups", 1)
    inner = count(config, "inner_group_num", 1)
    vocabulary, positions = count(config, "vocab_size"), count(config, "max_position_embeddings")
    types = count(config, "type_vocab_size", 2)
    act = choice(config, "hidden_act", ACTIVATIONS, "gelu_new")
    eps, k = positive(config, "layer_norm_eps", 1e-12), width_of(d, heads)

    def made(read: Reader) -> Architecture:
        def place(number):
            group = int(number // inner / (layers / groups))
            return f"encoder.albert_layer_groups.{group}.albert_layers.{number % inner}."

        def layer(number):
            at = place(number)
            parts = [read.heads(f"{at}attention.{part}", heads, k, d) for part in ("query", "key", "value")]
            attention = Attention(
                *(weight for weight, _ in parts),
                by_head(read(at + "attention.dense.weight", d, d), heads),
                *(bias for _, bias in parts),
                read(at + "attention.dense.bias", d),
                scale=k**-0.5,
            )
            forward = FeedForward(
                up=read(at + "ffn.weight", m, d),
                up_bias=read(at + "ffn.bias", m),
                down=read(at + "ffn_output.weight", d, m),
                down_bias=read(at + "ffn_output.bias", d),
                activation=act,
            )
            before = read.norm(place(number - 1) + "full_layer_layer_norm", d, eps) if number else None
            return Layer(before, attention, read.norm(at + "attention.LayerNorm", d, eps), forward)

        def embed(ids):
            word = read.raw("embeddings.word_embeddings.weight", vocabulary, e)[ids]
            x = (
                np.asarray(word, np.float64)
                + read.raw("embeddings.position_embeddings.weight", positions, e)[: len(ids)]
            )
            x = read.norm("embeddings.LayerNorm", e, eps)(
                x + read.raw("embeddings.token_type_embeddings.weight", types, e)[0]
            )
            mapping = "encoder.embedding_hidden_mapping_in"
            return x @ read(mapping + ".weight", d, e).T + read(mapping + ".bias", d)

        return Architecture(
            name="albert",
            dimension=d,
            heads=heads,
            width=k,
            depth=layers * inner,
            post=True,
            centred=True,
            layer=layer,
            closing=lambda: read.norm(place(layers * inner - 1) + "full_layer_layer_norm", d, eps),
            embed=embed,
            shared=groups == inner == 1,
            positions=positions,
            vocabulary=vocabulary,
        )

    reader = Reader(tensors, "encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight")
    return checked(made(reader), made(reader.checked()))
