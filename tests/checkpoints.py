"""Tiny random checkpoints in the layout of each architecture, and a naive forward pass that reads them by name."""

import json
import math
import os
import pickle
import struct
import zipfile

import numpy as np
from safetensors.numpy import save_file

CONFIGS = {
    "bert": {
        "model_type": "bert",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "vocab_size": 11,
        "max_position_embeddings": 9,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    },
    "roberta": {
        "model_type": "roberta",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "vocab_size": 11,
        "max_position_embeddings": 11,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "hidden_act": "gelu",
    },
    "distilbert": {
        "model_type": "distilbert",
        "dim": 16,
        "n_heads": 2,
        "n_layers": 2,
        "hidden_dim": 24,
        "vocab_size": 11,
        "max_position_embeddings": 9,
        "activation": "gelu",
    },
    "albert": {
        "model_type": "albert",
        "hidden_size": 16,
        "embedding_size": 6,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "intermediate_size": 24,
        "vocab_size": 11,
        "max_position_embeddings": 9,
        "type_vocab_size": 2,
        "hidden_act": "gelu_new",
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 3,
        "n_positions": 9,
        "vocab_size": 11,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "vocab_size": 11,
        "max_position_embeddings": 9,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "hidden_act": "silu",
    },
}


def shapes(config):
    """Name -> shape, in the layout of the framework that these checkpoints come from."""
    kind, out = config["model_type"], {}

    def linear(name, m, d):
        out[f"{name}.weight"], out[f"{name}.bias"] = (m, d), (m,)

    def norm(name, d):
        out[f"{name}.weight"], out[f"{name}.bias"] = (d,), (d,)

    vocabulary = config["vocab_size"]
    if kind in ("bert", "roberta"):
        d, m = config["hidden_size"], config["intermediate_size"]
        out["embeddings.word_embeddings.weight"] = (vocabulary, d)
        out["embeddings.position_embeddings.weight"] = (config["max_position_embeddings"], d)
        out["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], d)
        norm("embeddings.LayerNorm", d)
        for i in range(config["num_hidden_layers"]):
            at = f"encoder.layer.{i}."
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                linear(f"{at}attention.{part}", d, d)
            norm(at + "attention.output.LayerNorm", d)
            linear(at + "intermediate.dense", m, d)
            linear(at + "output.dense", d, m)
            norm(at + "output.LayerNorm", d)
    elif kind == "distilbert":
        d, m = config["dim"], config["hidden_dim"]
        out["embeddings.word_embeddings.weight"] = (vocabulary, d)
        out["embeddings.position_embeddings.weight"] = (config["max_position_embeddings"], d)
        norm("embeddings.LayerNorm", d)
        for i in range(config["n_layers"]):
            at = f"transformer.layer.{i}."
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                linear(f"{at}attention.{part}", d, d)
            norm(at + "sa_layer_norm", d)
            linear(at + "ffn.lin1", m, d)
            linear(at + "ffn.lin2", d, m)
            norm(at + "output_layer_norm", d)
    elif kind == "albert":
        d, e, m = config["hidden_size"], config["embedding_size"], config["intermediate_size"]
        out["embeddings.word_embeddings.weight"] = (vocabulary, e)
        out["embeddings.position_embeddings.weight"] = (config["max_position_embeddings"], e)
        out["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], e)
        norm("embeddings.LayerNorm", e)
        linear("encoder.embedding_hidden_mapping_in", d, e)
        at = "encoder.albert_layer_groups.0.albert_layers.0."
        for part in ("query", "key", "value", "dense"):
            linear(f"{at}attention.{part}", d, d)
        norm(at + "attention.LayerNorm", d)
        linear(at + "ffn", m, d)
        linear(at + "ffn_output", d, m)
        norm(at + "full_layer_layer_norm", d)
    elif kind == "gpt2":
        d = config["n_embd"]
        out["wte.weight"], out["wpe.weight"] = (vocabulary, d), (config["n_positions"], d)
        for i in range(config["n_layer"]):
            at = f"h.{i}."
            norm(at + "ln_1", d)
            norm(at + "ln_2", d)
            for part, rows, columns in (
                ("attn.c_attn", d, 3 * d),
                ("attn.c_proj", d, d),
                ("mlp.c_fc", d, 4 * d),
                ("mlp.c_proj", 4 * d, d),
            ):
                out[f"{at}{part}.weight"], out[f"{at}{part}.bias"] = (rows, columns), (columns,)
        norm("ln_f", d)
    else:
        d, m, k = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        out["embed_tokens.weight"], out["norm.weight"] = (vocabulary, d), (d,)
        for i in range(config["num_hidden_layers"]):
            at = f"layers.{i}."
            out[at + "input_layernorm.weight"] = out[at + "post_attention_layernorm.weight"] = (d,)
            out[at + "self_attn.q_proj.weight"] = (config["num_attention_heads"] * k, d)
            out[at + "self_attn.k_proj.weight"] = (config["num_key_value_heads"] * k, d)
            out[at + "self_attn.v_proj.weight"] = (config["num_key_value_heads"] * k, d)
            out[at + "self_attn.o_proj.weight"] = (d, config["num_attention_heads"] * k)
            out[at + "mlp.gate_proj.weight"] = out[at + "mlp.up_proj.weight"] = (m, d)
            out[at + "mlp.down_proj.weight"] = (d, m)
    return out


def random_tensors(config, seed=0, scale=0.5):
    """float32 weights of every name; gains of norms near 1."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config).items():
        a = scale * rng.standard_normal(shape)
        gain = len(shape) == 1 and name.endswith(".weight")
        out[name] = (1 + 0.4 * a if gain else a).astype(np.float32)
    return out


def write_folder(folder, config, tensors, prefix=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: a for name, a in tensors.items()}, folder / "model.safetensors")
    return folder


# ---- a naive forward pass: one head, one token at a time ----


def _norm(x, w, b, eps):
    return np.array([(row - row.mean()) / np.sqrt(row.var() + eps) * w + b for row in x])


def _rms(x, w, eps):
    return np.array([row / np.sqrt((row**2).mean() + eps) * w for row in x])


def _gelu(z):
    return np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z.ravel()]).reshape(z.shape)


def _gelu_new(z):
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _attend(q, k, v, heads, causal=False):
    """Softmax attention of projections (n, H k), with as many key heads as divide them."""
    n, width = len(q), q.shape[1] // heads
    groups = k.shape[1] // width
    out = np.zeros((n, heads * width))
    for h in range(heads):
        g = h * groups // heads
        for i in range(n):
            seen = range(i + 1 if causal else n)
            s = [q[i, h * width : (h + 1) * width] @ k[j, g * width : (g + 1) * width] / math.sqrt(width) for j in seen]
            e = np.exp(np.array(s) - max(s))
            for j, c in zip(seen, e / e.sum(), strict=True):
                out[i, h * width : (h + 1) * width] += c * v[j, g * width : (g + 1) * width]
    return out


def _rotate(a, width, theta):
    """Pairs (i, i + width/2) of every head turned as complex numbers."""
    out = a.copy()
    for p in range(len(a)):
        for start in range(0, a.shape[1], width):
            for i in range(width // 2):
                z = (a[p, start + i] + 1j * a[p, start + i + width // 2]) * np.exp(1j * p * theta ** (-2 * i / width))
                out[p, start + i], out[p, start + i + width // 2] = z.real, z.imag
    return out


def reference(config, tensors, ids):
    """(embedded residual, last hidden state) of the network, in float64."""
    w = {name: a.astype(np.float64) for name, a in tensors.items()}
    kind, n = config["model_type"], len(ids)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(x, name, eps):
        return _norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    if kind in ("bert", "roberta", "distilbert"):
        eps = {"bert": 1e-12, "roberta": 1e-5, "distilbert": 1e-12}[kind]
        first = 2 if kind == "roberta" else 0
        r = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][first : first + n]
        if kind != "distilbert":
            r = r + w["embeddings.token_type_embeddings.weight"][0]
        x = norm(r, "embeddings.LayerNorm", eps)
        distil = kind == "distilbert"
        heads = config["n_heads" if distil else "num_attention_heads"]
        for i in range(config["n_layers" if distil else "num_hidden_layers"]):
            at = f"transformer.layer.{i}." if distil else f"encoder.layer.{i}."
            names = ("q_lin", "k_lin", "v_lin") if distil else ("self.query", "self.key", "self.value")
            a = _attend(*(linear(x, f"{at}attention.{name}") for name in names), heads)
            a = linear(a, at + ("attention.out_lin" if distil else "attention.output.dense"))
            x = norm(x + a, at + ("sa_layer_norm" if distil else "attention.output.LayerNorm"), eps)
            up, down = ("ffn.lin1", "ffn.lin2") if distil else ("intermediate.dense", "output.dense")
            f = linear(_gelu(linear(x, at + up)), at + down)
            x = norm(x + f, at + ("output_layer_norm" if distil else "output.LayerNorm"), eps)
        return r, x
    if kind == "albert":
        e = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:n]
        e = norm(e + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm", 1e-12)
        r = x = linear(e, "encoder.embedding_hidden_mapping_in")
        at = "encoder.albert_layer_groups.0.albert_layers.0."
        for _ in range(config["num_hidden_layers"]):
            a = _attend(*(linear(x, f"{at}attention.{p}") for p in ("query", "key", "value")), 2)
            x = norm(x + linear(a, at + "attention.dense"), at + "attention.LayerNorm", 1e-12)
            x = norm(
                x + linear(_gelu_new(linear(x, at + "ffn")), at + "ffn_output"), at + "full_layer_layer_norm", 1e-12
            )
        return r, x
    if kind == "gpt2":
        r = x = w["wte.weight"][ids] + w["wpe.weight"][:n]

        def conv(x, name):
            return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

        for i in range(config["n_layer"]):
            at = f"h.{i}."
            q, k, v = np.split(conv(norm(x, at + "ln_1", 1e-5), at + "attn.c_attn"), 3, axis=1)
            x = x + conv(_attend(q, k, v, config["n_head"], causal=True), at + "attn.c_proj")
            x = x + conv(_gelu_new(conv(norm(x, at + "ln_2", 1e-5), at + "mlp.c_fc")), at + "mlp.c_proj")
        return r, norm(x, "ln_f", 1e-5)
    r = x = w["embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        y = _rms(x, w[at + "input_layernorm.weight"], 1e-6)
        q, k, v = (linear(y, f"{at}self_attn.{p}_proj") for p in "qkv")
        q, k = (_rotate(a, config["head_dim"], config["rope_theta"]) for a in (q, k))
        x = x + linear(_attend(q, k, v, config["num_attention_heads"], causal=True), at + "self_attn.o_proj")
        y = _rms(x, w[at + "post_attention_layernorm.weight"], 1e-6)
        gate = linear(y, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, at + "mlp.up_proj"), at + "mlp.down_proj")
    return r, _rms(x, w["norm.weight"], 1e-6)


# ---- a .bin file without torch: the pickle is written opcode by opcode ----


def _text(s):
    raw = s.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int(i):
    return b"J" + struct.pack("<i", i) if -(2**31) <= i < 2**31 else b"\x8a\x08" + struct.pack("<q", i)


def _ints(values):
    return b"(" + b"".join(_int(i) for i in values) + b"t"


def tensor_pickle(entries, tail=b""):
    """A pickled dict of tensors from (name, storage class, key, count, offset, size, stride) entries."""
    out = b"\x80\x02}("
    for name, kind, key, count, offset, size, stride in entries:
        out += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n("
        out += b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text(key) + _text("cpu") + _int(count) + b"tQ"
        out += _int(offset) + _ints(size) + _ints(stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    return out + tail + b"u."


def write_bin(path, tensors, data=None, compression=zipfile.ZIP_STORED):
    """A .bin file of float32 tensors; `data` replaces the pickle."""
    entries = []
    with zipfile.ZipFile(path, "w", compression) as archive:
        for number, (name, a) in enumerate(tensors.items()):
            stride = tuple(s // a.itemsize for s in np.ascontiguousarray(a).strides)
            entries.append((name, "FloatStorage", str(number), a.size, 0, a.shape, stride))
            archive.writestr(f"model/data/{number}", np.ascontiguousarray(a).tobytes())
        archive.writestr("model/data.pkl", tensor_pickle(entries) if data is None else data)
    return path


class Payload:
    """Pickles to a call that leaves a mark, should it ever run."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def hostile_pickle(mark, protocol=2):
    return pickle.dumps({"x": Payload(mark)}, protocol)
