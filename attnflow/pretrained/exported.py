"""Weights out of an ONNX export, whose matrices have lost their names.

Exporters keep the names of biases and rename matrices, and quantisers store integers with scales that tensors share. So
a matrix is found by its use: from a named bias back through its Add to the product it was added to, and its scale and
zero point are read off the same nodes. Nothing is executed; activations stay in floating point.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .files import Tensors, from_mapping, regular_file

# what may lie between a constant and its use, or between a product and its bias
_THROUGH = ("Cast", "Identity")
_LARGEST = 2**31  # the format's own limit


def read_onnx(path: Path) -> Tensors:
    """The tensors of an ONNX file under the names of the framework that exported it, dequantised, matrices as (out, in).

    **Errors:** ValueError where the file is damaged, keeps its data in other files, or the package onnx is missing.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise ValueError("ONNX files need the package `onnx`: pip install 'attnflow[onnx]'.") from None
    try:
        graph = onnx.load_model_from_string(regular_file(path, _LARGEST).read_bytes()).graph
        outside = [i.name for i in graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL]
        if outside:
            raise ValueError(f"{outside[0]} is kept in another file, which is not followed")
        constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        found = _Graph(list(graph.node), constants).named()
    except Exception as problem:  # the parser raises its own kinds
        raise ValueError(f"{path} is not a readable ONNX model: {problem or type(problem).__name__}.") from None
    return from_mapping(found, str(path))


class _Graph:
    """Nodes by what they make and use; constants with their dequantisation."""

    def __init__(self, nodes: list[Any], constants: dict[str, np.ndarray]):
        self.constants = constants
        self.maker = {name: node for node in nodes for name in node.output}
        self.users: dict[str, list[Any]] = {}
        for node in nodes:
            for name in node.input:
                self.users.setdefault(name, []).append(node)

    def named(self) -> dict[str, np.ndarray]:
        """Every floating constant by its name, `..._quantized` ones under the plain name, and a `.weight` for each `.bias`."""
        out = {name: a for name, a in self.constants.items() if a.dtype.kind == "f"}
        for name in list(self.maker):
            if name.endswith(".weight") and (a := self.constant(name)) is not None:
                out[name] = a
        for name, a in self.constants.items():
            plain = name.removesuffix("_quantized")
            if plain != name and a.dtype.kind in "iu" and (found := self.gathered(name)) is not None:
                out[plain] = found
        for name in [n for n in out if n.endswith(".bias")]:
            weight = name.removesuffix("bias") + "weight"
            if weight not in out and (matrix := self.matrix(name)) is not None:
                out[weight] = matrix.T
        return out

    def constant(self, name: str, depth: int = 8) -> np.ndarray | None:
        """The value of a tensor that depends on constants only, through casts, scalings and dequantisation."""
        if name in self.constants:
            return self.constants[name]
        node = self.maker.get(name)
        if node is None or depth == 0:
            return None
        if node.op_type not in (*_THROUGH, "Mul", "DequantizeLinear", "Transpose"):
            return None
        parts = self.constants_of(node.input, depth - 1)
        if not parts:
            return None
        if node.op_type == "DequantizeLinear":
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            return _dequantised(parts[0], parts[1], parts[2] if len(parts) > 2 else None, axis)
        if node.op_type == "Mul":
            shape = np.broadcast_shapes(parts[0].shape, parts[1].shape)
            if shape not in (parts[0].shape, parts[1].shape):
                return None  # an outer product is no scaling, and could be of any size
            return parts[0].astype(np.float64) * parts[1].astype(np.float64)
        if node.op_type == "Transpose":
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
            return np.transpose(parts[0], order)
        return parts[0]

    def constants_of(self, names: Iterable[str], depth: int = 8) -> list[np.ndarray]:
        """The values of all `names`, or nothing if one is not constant."""
        parts = [self.constant(name, depth) for name in names]
        return [] if any(part is None for part in parts) else [part for part in parts if part is not None]

    def gathered(self, name: str) -> np.ndarray | None:
        """An integer table whose rows are looked up first and dequantised afterwards."""
        for user in self.users.get(name, []):
            if user.op_type != "Gather":
                continue
            for later in self.users.get(user.output[0], []):
                if later.op_type == "DequantizeLinear":
                    rest = self.constants_of(later.input[1:])
                    if rest and all(a.size == 1 for a in rest):
                        return _dequantised(self.constants[name], rest[0], rest[1] if len(rest) > 1 else None)
        return None

    def matrix(self, bias: str) -> np.ndarray | None:
        """The (in, out) matrix of the product that `bias` is added to."""
        for user in self.users.get(bias, []):
            for name in user.input:
                if name != bias and (matrix := self.product(name)) is not None:
                    return matrix
        return None

    def product(self, name: str) -> np.ndarray | None:
        """The constant operand of the matrix product that made `name`, times the scales that follow."""
        scale: np.ndarray | None = None
        for _ in range(8):
            node = self.maker.get(name)
            if node is None:
                return None
            if node.op_type in ("MatMul", "Gemm"):
                a = self.constant(node.input[1])
                turned = any(x.name == "transB" and x.i for x in node.attribute)
                return None if a is None or a.ndim != 2 else a.T if turned else a
            if node.op_type == "MatMulInteger":
                a = self.constants.get(node.input[1])
                zero = self.constants.get(node.input[3]) if len(node.input) > 3 else None
                return None if a is None or scale is None or a.ndim != 2 else _dequantised(a, scale, zero, 1)
            if node.op_type == "Mul":
                # product * (activation scale * weight scale): the constant factor is the weight's
                inner = [i for i in node.input if self._is_scale(i)]
                if len(inner) != 1:
                    return None
                scale = self._weight_scale(inner[0])
                name = next(i for i in node.input if i != inner[0])
            elif node.op_type in _THROUGH:
                name = node.input[0]
            else:
                return None
        return None

    def _is_scale(self, name: str) -> bool:
        node = self.maker.get(name)
        return node is not None and node.op_type == "Mul" and any(i in self.constants for i in node.input)

    def _weight_scale(self, name: str) -> np.ndarray:
        return next(self.constants[i] for i in self.maker[name].input if i in self.constants)


def _dequantised(a: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, axis: int = 1) -> np.ndarray:
    """scale (a - zero), per entry of `axis` where these are vectors."""

    def along(v):
        v = v.astype(np.float64)
        return v.reshape([-1 if i == axis % a.ndim else 1 for i in range(a.ndim)]) if v.size > 1 else v.reshape(())

    return (a.astype(np.float64) - (0 if zero is None else along(zero))) * along(scale)
