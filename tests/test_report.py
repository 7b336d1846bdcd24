"""The report page: what it embeds is what was computed, nothing embedded can act, and a real browser can use it."""

import base64
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from browser import chromium, missing

from attnflow import config, studies
from attnflow.cells import open_cell
from attnflow.dataset import load
from attnflow.files import save_heads
from attnflow.heads import AlignedHeads, ScalarHeads
from attnflow.points import grid
from attnflow.report import report
from attnflow.report.flows import flows, projection
from attnflow.run import run
from attnflow.schema import ConfigError
from attnflow.sweep import sweep

ROOT = Path(__file__).parents[1]

EXPERIMENT = """
title = "small"
observe = ["order_parameter", "entropy", "radial_shadow"]
[tokens]
kind = "uniform"
n = 16
d = 3
[heads]
kind = "aligned"
matrix = [[[1.0, 0, 0], [0, 0.5, 0], [0, 0, 0.2]]]
[attention]
beta = [1.0, 4.0]
[solve]
t1 = 3.0
times = 21
"""
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&\u2028"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `attnflow run` writes for two betas, with a title that tries to act."""
    out = tmp_path_factory.mktemp("run")
    (out / "small.toml").write_text(EXPERIMENT)
    experiment = config.read(out / "small.toml", [f"title={json.dumps(HOSTILE)}"])
    run(experiment, out, say=lambda _: None)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if missing() and not os.environ.get("ATTNFLOW_NEEDS_BROWSER"):
        pytest.skip(missing())
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def flowing(out, n, d, times, *, heads=None, weights=None):
    """A folder with one flow of n tokens that turn in the first two coordinates, without solving anything."""
    x = np.random.default_rng(0).normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    angle = np.linspace(0, 1, times)
    turn = np.zeros((times, d, d))
    turn[:, range(d), range(d)] = 1
    turn[:, 0, 0] = turn[:, 1, 1] = np.cos(angle)
    turn[:, 0, 1], turn[:, 1, 0] = np.sin(angle), -np.sin(angle)
    arrays = {"ts": 10 * angle, "tokens": x[None] @ turn, "order_parameter": angle}
    np.savez(out / "flow_0.npz", **arrays, **({} if weights is None else {"weights": weights}))
    if heads is not None:
        save_heads(out / "heads.safetensors", heads)
    return arrays


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.inside, self.data = [], None, ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = dict(attributes).get("id") if tag == "script" else None

    def handle_data(self, text):
        if self.inside == "data":
            self.data += text


def parsed(page):
    elements = Elements()
    elements.feed(page.read_text(encoding="utf-8"))
    return elements


def decoded(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def test_frames_in_the_page_are_the_flow_to_sixteen_bits(folder, tmp_path):
    page = parsed(report(folder, tmp_path / "page.html"))
    shown = json.loads(page.data)["flows"]
    assert [flow["label"] for flow in shown] == ["beta = 1", "beta = 4"]
    for k, flow in enumerate(shown):
        with np.load(folder / f"flow_{k}.npz") as stored:
            tokens = decoded(flow["tokens"], "<i2").reshape(stored["tokens"].shape) / 32767
            assert np.abs(tokens - stored["tokens"]).max() < 0.6 / 32767
            curve = next(s for s in flow["series"] if s["name"] == "order parameter")["curves"][0]["y"]
            assert curve == stored["order_parameter"].tolist() and flow["ts"] == stored["ts"].tolist()


def test_nothing_embedded_can_become_an_element(folder, tmp_path):
    page = parsed(report(folder, tmp_path / "page.html"))
    assert page.tags.count("script") == 2 and page.tags.count("img") == 1  # data and code; the figure
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "").split("<pre>")[0]


def test_eigenspaces_are_lines_and_planes_where_they_are_not_everything(tmp_path):
    matrices = jnp.stack([jnp.diag(jnp.array([1.0, 0.5, 0.2])), jnp.diag(jnp.array([0.1, 1.0, 1.0])), jnp.eye(3)])
    flowing(tmp_path, 5, 3, 3, heads=AlignedHeads(matrices))
    spaces = flows(tmp_path)[0]["spaces"]
    assert [s["kind"] for s in spaces] == ["line", "plane"]
    assert np.allclose(np.abs([s["vector"] for s in spaces]), [[1, 0, 0], [1, 0, 0]])
    (tmp_path / "plain").mkdir()
    flowing(tmp_path / "plain", 5, 3, 3, heads=ScalarHeads([1.0]))
    assert flows(tmp_path / "plain")[0]["spaces"] == []


def test_high_dimension_is_seen_along_the_leading_directions(tmp_path):
    x = np.random.default_rng(1).normal(size=(50, 6)) * [5, 4, 3, 0.1, 0.1, 0.1]
    basis, share = projection(x / np.linalg.norm(x, axis=1, keepdims=True))
    assert basis.shape == (6, 3) and np.abs(basis[3:]).max() < 0.1 and share > 0.99
    flowing(tmp_path, 8, 6, 4)
    (flow,) = flows(tmp_path)
    assert flow["dims"] == 3 and "projected" in flow["note"]


def test_frames_that_were_not_reached_are_left_out_and_big_flows_thinned(tmp_path):
    arrays = flowing(tmp_path, 4, 3, 10)
    arrays["tokens"][6:], arrays["ts"][6:] = np.nan, np.nan
    np.savez(tmp_path / "flow_0.npz", **arrays)
    (flow,) = flows(tmp_path)
    assert len(flow["ts"]) == 6 and "4 frames were not reached" in flow["note"]
    flowing(tmp_path, 9000, 3, 500)
    (flow,) = flows(tmp_path)
    assert len(flow["ts"]) == 400 and flow["n"] == 4500 and "of 9000 tokens shown" in flow["note"]


def test_tokens_off_the_sphere_are_scaled_frame_by_frame(tmp_path):
    arrays = flowing(tmp_path, 5, 3, 4)
    grown = arrays["tokens"] * np.exp(10 * arrays["ts"])[:, None, None]
    np.savez(tmp_path / "flow_0.npz", ts=arrays["ts"], tokens=grown)
    (flow,) = flows(tmp_path)
    shown = decoded(flow["tokens"], "<i2").reshape(grown.shape) / 32767
    assert np.allclose(np.abs(shown).max(axis=(1, 2)), 1) and not flow["sphere"] and "scaled" in flow["note"]


def test_folders_without_anything_to_show_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        report(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="written by attnflow"):
        report(tmp_path)


def swept(beta, seed, ts):
    noise = jr.uniform(seed)
    return {"share": beta * ts + noise, "total": beta + noise}


def test_cells_of_a_sweep_hold_the_means_over_its_keys(tmp_path):
    ts = jnp.linspace(0.0, 1.0, 5)
    points = grid(beta=[1.0, 2.0, 4.0], seed=jr.split(jr.key(0), 6))
    out = sweep(swept, points, shared=(ts,), store=tmp_path / "store", dims={"share": ("time",)})
    shown = json.loads(parsed(report(tmp_path / "store", tmp_path / "page.html")).data)
    assert shown["y"] == {"name": "beta", "values": [1.0, 2.0, 4.0]} and shown["x"]["name"] == "t"
    values = decoded(shown["choices"][0]["values"], "<f4").reshape(3, 5)
    assert np.allclose(values, out["share"].mean("seed").transpose("beta", "time"), rtol=1e-6)
    assert shown["choices"][0]["count"] == 6


def total_only(beta):
    return {"total": 2 * beta}


def test_sweeps_over_one_or_two_axes_without_time_are_maps_too(tmp_path):
    sweep(total_only, grid(beta=[1.0, 2.0, 4.0]), store=tmp_path / "one")
    shown = json.loads(parsed(report(tmp_path / "one")).data)
    assert decoded(shown["choices"][0]["values"], "<f4").tolist() == [2.0, 4.0, 8.0] and len(shown["x"]["values"]) == 1
    assert [row["command"].split("--cell ")[1] for row in shown["choices"][0]["rows"]] == ["0", "1", "2"]
    sweep(swept_plane, grid(beta=[1.0, 2.0], gain=[1.0, 2.0, 3.0]), store=tmp_path / "two")
    shown = json.loads(parsed(report(tmp_path / "two")).data)
    assert (shown["y"]["name"], shown["x"]["name"]) == ("beta", "gain")
    assert decoded(shown["choices"][0]["values"], "<f4").tolist() == [1.0, 2.0, 3.0, 2.0, 4.0, 6.0]


def swept_plane(beta, gain):
    return {"total": beta * gain}


def move(browser, k):
    """Put the slider at frame k, as a hand does, and return the canvas."""
    browser.run(
        "const s = document.getElementById('time'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", k
    )
    return browser.run("return document.getElementById('stage').toDataURL()")


@pytest.mark.slow
@pytest.mark.browser
def test_slider_moves_tokens_and_hands_turn_the_sphere(folder, browser, tmp_path):
    browser.open(report(folder, tmp_path / "page.html"))
    browser.until("return document.body.dataset.drawn")
    first = move(browser, 0)
    assert move(browser, 20) != first and move(browser, 0) == first
    browser.press("#time", "\ue014")  # arrow to the right
    assert browser.until("return document.body.dataset.frame === '1'")
    move(browser, 0)
    browser.drag("#stage", (60, 20))
    assert browser.run("return document.getElementById('stage').toDataURL()") != first
    browser.run("document.getElementById('pace').value = 60")
    browser.click("#play")
    assert browser.until("return document.body.dataset.frame === '20'")
    browser.run("const s = document.getElementById('flow'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert len(browser.run("return [...document.querySelectorAll('.panel')].map((p) => p.textContent)")) == 3
    assert browser.run("return window.hacked === undefined && document.title.includes('script')")
    assert browser.errors() == []


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("n", "d"), [(5000, 3), (300, 2), (40, 6)])
def test_every_dimension_and_five_thousand_tokens_play_without_an_error(n, d, browser, tmp_path):
    flowing(tmp_path, n, d, 200, weights=np.full(n, 1 / n))
    browser.open(report(tmp_path))
    browser.until("return document.body.dataset.drawn")
    shown = {move(browser, k) for k in (0, 60, 120, 199)}
    assert len(shown) == 4
    drawn = browser.run("for (let k = 0; k < 200; k++) { frame = k; show(); } return document.body.dataset.drawn")
    assert int(drawn) >= 204
    assert browser.errors() == []


@pytest.mark.slow
@pytest.mark.browser
def test_cells_of_a_phase_diagram_show_their_values(browser, tmp_path):
    ts = jnp.linspace(0.0, 1.0, 5)
    points = grid(beta=[1.0, 2.0, 4.0], seed=jr.split(jr.key(0), 6))
    out = sweep(swept, points, shared=(ts,), store=tmp_path / "store", dims={"share": ("time",)})
    browser.open(report(tmp_path / "store", tmp_path / "page.html"))
    browser.until("return document.body.dataset.picked")
    browser.click("#stage")  # the middle cell
    assert browser.until("return document.body.dataset.picked === '1 2'")
    value = float(out["share"].mean("seed").sel(beta=2.0)[2])
    assert f"{value:.4g}" in browser.run("return document.getElementById('picked').textContent")
    browser.press("#stage", "\ue013")  # arrow up
    assert browser.until("return document.body.dataset.picked === '2 2'")
    assert "--cell 2 0" in browser.run("return document.getElementById('command').textContent")
    assert browser.errors() == []


def test_run_folders_of_the_project_have_a_page(tmp_path):
    """Fits and studies without a store: their figure, tables and configuration."""
    (tmp_path / "results.json").write_text('{"rows": [{"n": 8, "t": 1.5}], "acceptance": []}')
    (tmp_path / "config.toml").write_text('title = "a study"\n')
    text = Path(report(tmp_path)).read_text(encoding="utf-8")
    assert (
        "<h1>a study</h1>" in text
        and "<td>1.5</td>" in text
        and parsed(tmp_path / "report.html").tags.count("script") == 0
    )


@pytest.mark.slow
def test_a_cell_is_the_same_flow_as_in_the_sweep_and_is_linked(tmp_path):
    study = studies.read(
        ROOT / "configs" / "phase_diagram.toml",
        ["study.n=8", "study.betas=3", "study.seeds=2", "study.times=5", "study.t1=3.0"],
    )
    studies.run_study(study, tmp_path)
    page = open_cell(tmp_path, (2, 0, 1))
    with np.load(tmp_path / "cells" / "2_0_1" / "flow_0.npz") as again:
        swept = load(tmp_path / "store").mean_cosine.isel(beta=2, strengths=0, key=1)
        assert np.allclose(again["mean_cosine"], swept, atol=1e-6) and again["tokens"].shape == (5, 8, 2)
    rows = json.loads(parsed(report(tmp_path)).data)["choices"][0]["rows"]
    assert page.exists() and [row["href"] for row in rows] == [None] * 3  # the rows show the first key
    open_cell(tmp_path, (2, 0, 0))
    rows = json.loads(parsed(report(tmp_path)).data)["choices"][0]["rows"]
    assert rows[2]["href"] == "cells/2_0_0/report.html" and rows[2]["command"].endswith("--cell 2 0 0")
    with pytest.raises(ConfigError, match=r"one index per axis \(beta 0..2, strengths 0..0, key 0..1\), got 2 0 2"):
        open_cell(tmp_path, (2, 0, 2))
