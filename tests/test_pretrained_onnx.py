"""Weights come out of an ONNX export by their use, whatever the exporter called them."""

import json

import numpy as np
import onnx
import pytest
from checkpoints import CONFIGS, random_tensors, reference
from onnx import TensorProto, helper, numpy_helper

from attnflow import pretrained

CONFIG = CONFIGS["bert"]
IDS = [3, 1, 4, 1, 5, 9]


def quantised(w):
    """(integers, scale, zero point) of a (in, out) matrix by column, and the matrix that they stand for."""
    low, high = np.minimum(w.min(0), 0), np.maximum(w.max(0), 0)
    scale = ((high - low) / 255).astype(np.float32)
    zero = np.clip(np.round(-low / scale) - 128, -128, 127).astype(np.int8)
    q = np.clip(np.round(w / scale) + zero, -128, 127).astype(np.int8)
    return q, scale, zero, ((q.astype(np.float64) - zero) * scale)


def export(path, tensors, style):
    """Only the parts of a graph that carry weights, in one of the styles of real exporters; returns the tensors that it holds."""
    nodes, constants, held = [], [], {}

    def constant(name, a):
        constants.append(numpy_helper.from_array(np.ascontiguousarray(a), name))
        return name

    for number, (name, a) in enumerate(tensors.items()):
        if name.endswith("_embeddings.weight") or "LayerNorm" in name or name.endswith(".bias"):
            if style == "integer" and name.endswith("_embeddings.weight"):
                scale = np.float32(np.abs(a).max() / 127)
                q = np.round(a / scale).astype(np.int8)
                constant(name + "_quantized", q)
                nodes.append(helper.make_node("Gather", [name + "_quantized", "ids"], [f"rows{number}"]))
                scales = [constant(name + "_scale", scale), constant(f"z{number}", np.int8(0))]
                nodes.append(helper.make_node("DequantizeLinear", [f"rows{number}", *scales], [f"row{number}"]))
                held[name] = (q * np.float64(scale)).astype(np.float64)
            else:
                constant(name, a)
                held[name] = a
            continue
        bias, product, w = name.removesuffix("weight") + "bias", f"product{number}", a.T
        if style == "plain":
            constant(f"onnx::MatMul_{number}", w)
            nodes.append(helper.make_node("MatMul", [f"x{number}", f"onnx::MatMul_{number}"], [product]))
            held[name] = a
        elif style == "gemm":
            constant(f"W{number}", a)
            nodes.append(helper.make_node("Gemm", [f"x{number}", f"W{number}"], [product], transB=1))
            held[name] = a
        elif style == "weight-only":
            scale = (np.abs(w).max(0, keepdims=True) / 127).astype(np.float32)
            q = np.round(w / scale).astype(np.int8)
            constant(f"v{number}_q", q)
            constant(f"v{number}_scale", scale)
            nodes.append(helper.make_node("Cast", [f"v{number}_q"], [f"v{number}_f"], to=TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [f"v{number}_f", f"v{number}_scale"], [f"v{number}"]))
            nodes.append(helper.make_node("MatMul", [f"x{number}", f"v{number}"], [product]))
            held[name] = (q * scale.astype(np.float64)).T
        elif style == "dequantize":
            q, scale, zero, whole = quantised(w)
            parts = [constant(f"{kind}{number}", part) for kind, part in (("q", q), ("s", scale), ("z", zero))]
            nodes.append(helper.make_node("DequantizeLinear", parts, [f"v{number}"], axis=1))
            nodes.append(helper.make_node("MatMul", [f"x{number}", f"v{number}"], [product]))
            held[name] = whole.T
        else:  # dynamically quantised activations times integer weights
            q, scale, zero, whole = quantised(w)
            constant(f"q{number}", q)
            constant(f"s{number}", scale)
            constant(f"z{number}", zero)
            made = [f"{kind}{number}" for kind in ("xq", "xs", "xz")]
            nodes.append(helper.make_node("DynamicQuantizeLinear", [f"x{number}"], made))
            nodes.append(
                helper.make_node("MatMulInteger", [made[0], f"q{number}", made[2], f"z{number}"], [f"i{number}"])
            )
            nodes.append(helper.make_node("Cast", [f"i{number}"], [f"f{number}"], to=TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [made[1], f"s{number}"], [f"ss{number}"]))
            nodes.append(helper.make_node("Mul", [f"f{number}", f"ss{number}"], [product]))
            held[name] = whole.T
        nodes.append(helper.make_node("Add", [bias, product] if number % 2 else [product, bias], [f"out{number}"]))
    graph = helper.make_graph(nodes, "g", [], [], constants)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return held


@pytest.mark.parametrize("style", ["plain", "gemm", "weight-only", "dequantize", "integer"])
def test_an_export_is_the_network_of_its_dequantised_weights(tmp_path, style):
    tensors = random_tensors(CONFIG)
    held = export(tmp_path / "model.onnx", tensors, style)
    stack = pretrained.from_onnx(tmp_path / "model.onnx", CONFIG)
    _, last = reference(CONFIG, held, IDS)
    assert np.abs(stack.layers(stack.embed(IDS)).output - last).max() < 1e-10
    change = max(np.abs(held[name] - a).max() / np.abs(a).max() for name, a in tensors.items())
    assert change < 1e-2 and (change > 0) == (style in ("weight-only", "dequantize", "integer"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert np.array_equal(pretrained.load(tmp_path / "model.onnx").embed(IDS), stack.embed(IDS))


def test_damaged_exports_are_refused(tmp_path):
    file = tmp_path / "model.onnx"
    export(file, random_tensors(CONFIG), "plain")
    whole = file.read_bytes()
    for content in (b"", b"\xff" * 100, whole[: len(whole) // 2], whole[100:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a readable ONNX model|must hold one tensor|has no tensor"):
            pretrained.from_onnx(file, CONFIG)
    with pytest.raises(ValueError, match=r"no config\.json beside"):
        pretrained.from_onnx(file)


def test_data_in_other_files_is_not_followed(tmp_path):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    graph = helper.make_graph([], "g", [], [], [tensor])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(ValueError, match="kept in another file"):
        pretrained.from_onnx(tmp_path / "m.onnx", CONFIG)


def test_constants_that_would_grow_are_left_alone(tmp_path):
    tensors = random_tensors(CONFIG)
    file = tmp_path / "m.onnx"
    export(file, tensors, "plain")
    model = onnx.load_model_from_string(file.read_bytes())
    for name, shape in (("tall", (2**20, 1)), ("wide", (1, 2**20))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    model.graph.node.append(helper.make_node("Mul", ["tall", "wide"], ["huge.weight"]))  # 8 TiB
    model.graph.node.append(helper.make_node("Mul", ["loop.weight", "tall"], ["loop.weight"]))
    file.write_bytes(model.SerializeToString())
    stack = pretrained.from_onnx(file, CONFIG)
    assert len(stack) == 2
