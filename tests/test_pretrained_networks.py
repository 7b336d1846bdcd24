"""Every architecture is the network it says it is, whatever its files look like."""

import json

import numpy as np
import pytest
from checkpoints import CONFIGS, random_tensors, reference, write_bin, write_folder
from safetensors.numpy import save_file

from attnflow import pretrained

IDS = np.array([3, 1, 4, 1, 5, 9])


@pytest.fixture(params=CONFIGS, scope="module")
def network(request, tmp_path_factory):
    config = CONFIGS[request.param]
    tensors = random_tensors(config, seed=len(request.param))
    folder = write_folder(tmp_path_factory.mktemp(request.param), config, tensors)
    return config, tensors, pretrained.from_huggingface(folder)


def test_layers_are_the_reference_forward_pass(network):
    config, tensors, stack = network
    embedded, last = reference(config, tensors, IDS)
    passes = stack.layers(stack.embed(IDS))
    assert np.abs(stack.embed(IDS) - embedded).max() < 1e-14
    assert np.abs(passes.output - last).max() < 1e-10
    assert passes.residual.shape == (len(stack) + 1, len(IDS), 16)
    assert np.allclose(np.linalg.norm(passes.tokens, axis=-1), 1)


def test_every_prefix_names_the_same_network(network, tmp_path):
    config, tensors, stack = network
    kin = pretrained.load(write_folder(tmp_path / "a", config, tensors, prefix="model."))
    assert np.array_equal(kin.layers(kin.embed(IDS)).output, stack.layers(stack.embed(IDS)).output)


def test_bin_and_safetensors_hold_the_same_network(network, tmp_path):
    config, tensors, stack = network
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_bin(tmp_path / "pytorch_model.bin", tensors)
    other = pretrained.from_huggingface(tmp_path)
    assert np.array_equal(other.layers(other.embed(IDS)).output, stack.layers(stack.embed(IDS)).output)
    alone = pretrained.load(tmp_path / "pytorch_model.bin")
    assert np.array_equal(alone.layers(alone.embed(IDS)).output, stack.layers(stack.embed(IDS)).output)


def test_shards_hold_the_same_network(network, tmp_path):
    config, tensors, stack = network
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(where.values()):
        save_file({name: tensors[name] for name, s in where.items() if s == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    other = pretrained.from_huggingface(tmp_path)
    assert np.array_equal(other.layers(other.embed(IDS)).output, stack.layers(stack.embed(IDS)).output)


def test_a_tensor_of_the_wrong_shape_is_refused_by_name(network, tmp_path):
    config, tensors, _ = network
    for name, a in tensors.items():
        wrong = {**tensors, name: np.zeros((a.shape[0] + 1, *a.shape[1:]), np.float32)}
        folder = write_folder(tmp_path / "wrong", config, wrong)
        with pytest.raises(ValueError, match=name.replace(".", r"\.") + " must have shape"):
            pretrained.from_huggingface(folder)


def test_a_missing_tensor_is_refused_by_name(network, tmp_path):
    config, tensors, _ = network
    for name in tensors:
        rest = {other: a for other, a in tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"no tensor {name}|one tensor named {name}"):
            pretrained.from_huggingface(write_folder(tmp_path / "less", config, rest))


def test_ids_outside_the_vocabulary_are_refused(network):
    _, _, stack = network
    for ids, message in (
        ([11], "lie in"),
        ([-1], "lie in"),
        ([], "non-empty"),
        ([1.5], "integers"),
        ([1] * 10, "9 pos"),
    ):
        with pytest.raises(ValueError, match=message):
            stack.embed(ids)


def test_a_folder_says_what_it_is(network):
    config, _, stack = network
    assert config["model_type"] in repr(stack)
    assert stack.shared == (config["model_type"] == "albert")


def test_bfloat16_and_float16_are_read_in_full(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    config = CONFIGS["bert"]
    tensors = random_tensors(config)
    for kind in (np.float16, ml_dtypes.bfloat16):
        narrow = {name: a.astype(kind) for name, a in tensors.items()}
        stack = pretrained.from_huggingface(write_folder(tmp_path / np.dtype(kind).name, config, narrow))
        widened = {name: a.astype(np.float32) for name, a in narrow.items()}
        _, last = reference(config, widened, IDS)
        assert np.abs(stack.layers(stack.embed(IDS)).output - last).max() < 1e-10


def test_unknown_architectures_are_refused_with_the_list_of_known_ones(tmp_path):
    config = CONFIGS["bert"] | {"model_type": "mamba"}
    folder = write_folder(tmp_path, config, random_tensors(CONFIGS["bert"]))
    with pytest.raises(ValueError, match=r"'mamba'; known are bert, roberta, .*gpt2, albert, llama"):
        pretrained.from_huggingface(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -16},
        {"hidden_size": "16"},
        {"hidden_size": 16.0},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 3},
        {"hidden_act": "exp"},
        {"layer_norm_eps": float("nan")},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
    ],
)
def test_configurations_that_make_no_network_are_refused(tmp_path, change):
    folder = write_folder(tmp_path, CONFIGS["bert"] | change, random_tensors(CONFIGS["bert"]))
    with pytest.raises(ValueError, match=r"configuration|Only encoders"):
        pretrained.from_huggingface(folder)


def test_grouped_queries_share_their_keys():
    config = CONFIGS["llama"]
    tensors = random_tensors(config)
    from attnflow.pretrained.architectures import build
    from attnflow.pretrained.files import from_mapping

    attention = build(config, from_mapping(tensors, "memory")).layer(0).attention
    assert np.array_equal(attention.key[0], attention.key[1]) and np.array_equal(attention.value[2], attention.value[3])
    assert not np.array_equal(attention.key[1], attention.key[2])


def test_scaled_rotary_positions_are_not_run_but_diagnosed(tmp_path):
    config = CONFIGS["llama"] | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    stack = pretrained.from_huggingface(write_folder(tmp_path, config, random_tensors(config)))
    with pytest.raises(ValueError, match=r"rotary positions are scaled \(llama3\)"):
        stack.layers(stack.embed(IDS))
    assert pretrained.diagnose(stack).heat("gap").shape == (2, 4)


def test_gpt2_may_scale_scores_by_layer(tmp_path):
    config = CONFIGS["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}
    stack = pretrained.from_huggingface(write_folder(tmp_path, config, random_tensors(config)))
    assert [stack.layer(i).attention.scale for i in range(3)] == [8**-0.5 / (i + 1) for i in range(3)]


def test_old_names_of_layer_norms_are_known(tmp_path):
    config = CONFIGS["bert"]
    tensors = random_tensors(config)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): a
        for name, a in tensors.items()
    }
    stack = pretrained.from_huggingface(write_folder(tmp_path, config, old))
    assert np.abs(stack.layers(stack.embed(IDS)).output - reference(config, tensors, IDS)[1]).max() < 1e-10


def test_texts_are_read_by_the_tokenizer_of_the_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = CONFIGS["bert"]
    folder = write_folder(tmp_path, config, random_tensors(config))
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        pretrained.from_huggingface(folder).tokenize("a dog")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "dog": 2, "sat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(folder / "tokenizer.json"))
    stack = pretrained.from_huggingface(folder)
    assert stack.tokenize("a dog barked").tolist() == [1, 2, 0]  # no padding
    assert stack.tokenize("a dog " * 9).tolist() == [1, 2] * 4 + [1]  # as long as the positions
    found = pretrained.inspect(folder, "a dog sat")
    assert np.array_equal(found.heat("entropy"), pretrained.diagnose(stack, stack.embed([1, 2, 3])).heat("entropy"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer"):
        pretrained.from_huggingface(folder).tokenize("a dog")
