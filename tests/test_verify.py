"""The verification table: nothing unexpected, and a contradiction would be seen."""

import dataclasses
import io
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

from attnflow import sphere
from attnflow.attention import Exponential, ReLU, Softmax
from attnflow.field import AttentionField, ZeroTemperatureField
from attnflow.heads import Heads, ScalarHeads, gaussian, goe, orthogonal
from attnflow.verify import Row, paper_a, paper_b, table, to_json, unexpected, verify

PARTS = (*paper_a.PARTS, *paper_b.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_statement_holds_in_its_hypothesis_and_fails_where_it_is_known_to(part):
    rows = list(part())
    assert rows and not unexpected(rows), unexpected(rows)
    assert {row.status for row in rows} == {"holds", "fails as predicted"}


def test_verify_collects_the_parts_of_a_paper(monkeypatch):
    monkeypatch.setattr(paper_a, "PARTS", (paper_a.assumptions,))
    monkeypatch.setattr(paper_b, "PARTS", (paper_b.misaligned_values,))
    assert {row.paper for row in verify("A")} == {"A"} and {row.paper for row in verify("B")} == {"B"}
    assert len(verify()) == len(verify("A")) + len(verify("B"))
    with pytest.raises(ValueError, match="paper"):
        verify("C")
    with pytest.raises(ValueError, match="together"):
        verify("B", AttentionField(ScalarHeads([1.0]), Softmax(1.0)))


def test_a_contradiction_is_unexpected_in_both_directions():
    good = Row("B", "s", "r", 1.0, 0.0, 1.0, ">=", True, True, "")
    assert good.status == "holds" and dataclasses.replace(good, holds=False).status == "unexpected"
    assert dataclasses.replace(good, expected=False).status == "unexpected"
    assert dataclasses.replace(good, holds=False, expected=False).status == "fails as predicted"
    assert unexpected([good, dataclasses.replace(good, holds=False)])[0].holds is False


def by_name(rows):
    return {row.statement: row for row in rows}


@pytest.mark.slow
def test_own_heads_that_meet_the_hypotheses_are_held_to_the_theorems(key):
    planes = orthogonal(key, 2, 4, 2)
    general = Heads(planes.matrix, planes.matrix)  # the hypothesis is measured, not read off the type
    rows = by_name(verify("B", AttentionField(general, Exponential(0.5)), sphere.uniform(key, 6, 4)))
    assert not unexpected(rows.values())
    assert rows["hypothesis: aligned heads"].holds and rows["hypothesis: orthogonal heads"].holds
    for theorem in ("Theorem 11: dE/dt = mean |dx/dt|^2", "Theorems 16-17: dE_h/dt with the radial shadow"):
        assert rows[theorem].holds and rows[theorem].regime == "hypotheses met"
    assert "ScalarHeads" in rows["Theorem 19: beta <= beta*"].regime


@pytest.mark.slow
def test_own_heads_that_miss_are_told_by_how_much(key):
    rows = by_name(verify("B", AttentionField(gaussian(key, 2, 4), Softmax(1.0)), sphere.uniform(key, 6, 4)))
    assert not unexpected(rows.values())
    assert rows["hypothesis: aligned heads"].lhs > 0.1 and not rows["hypothesis: aligned heads"].holds
    assert "does not apply" in rows["Theorem 11: dE/dt = mean |dx/dt|^2"].regime
    assert rows["dH/dt = -beta^2 Cov(s, ds/dt)"].regime == "hypotheses met"


@pytest.mark.slow
def test_own_scalar_heads_are_recognised(key):
    field = AttentionField(ScalarHeads([1.0, 2.0]).dense(6), Softmax(1.0))
    rows = by_name(verify("B", field, sphere.equiangular(6, 0.2)))
    assert rows["equiangular law (Theorems 22, 25)"].regime == "hypotheses met"
    assert rows["Theorem 27: attention entropy rises"].status == "holds"
    assert "not met" in rows["Theorem 22: rate sum of phi"].regime and not unexpected(rows.values())


@pytest.mark.slow
def test_one_own_head_is_checked_against_paper_a(key):
    heads = Heads(jnp.diag(jnp.array([1.0, 4.0]))[None], jnp.diag(jnp.array([1.0, 0.5]))[None])
    x = sphere.circle(jnp.linspace(0.1, 6.0, 20))
    for field in (AttentionField(heads, Softmax(8.0)), ZeroTemperatureField(heads)):
        rows = by_name(verify("A", field, x))
        assert rows["Assumption 1"].holds and rows["W2(rho, Pi#rho)^2 = 2 - 2 E|P1 x|"].status == "holds"
    skew = Heads(jnp.eye(2)[None], jnp.array([[[1.0, 0.0], [0.5, 0.2]]]))
    rows = by_name(verify("A", AttentionField(skew, Softmax(8.0)), x))
    assert rows["Assumption 1"].lhs == -0.5
    assert "asymmetry 0.5" in rows["W2(rho, Pi#rho)^2 = 2 - 2 E|P1 x|"].regime
    assert "one head" in by_name(verify("A", AttentionField(goe(key, 2, 2), ReLU()), x))["Assumption 1"].regime


def test_rows_print_and_serialise():
    rows = [*paper_a.assumptions(), Row("A", "s", "r", float("nan"), 0.0, float("-inf"), ">=", False, False, "")]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(rows))
    text = console.export_text()
    assert "Assumption 1" in text and "fails as predicted" in text
    loaded = json.loads(to_json(rows))
    assert loaded[0]["status"] == "holds" and loaded[-1]["lhs"] is None and loaded[-1]["slack"] is None
