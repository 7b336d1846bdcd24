"""Every reader meets a fixed share of damaged files, and all that ever failed; `python tests/fuzz.py` is the full run."""

import fuzz
import pytest

KEPT = sorted(path for name in fuzz.CORPUS.iterdir() for path in name.iterdir())


@pytest.fixture(scope="module")
def watch():
    return fuzz.Watch()


@pytest.mark.parametrize("path", KEPT, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_what_once_failed_does_not_fail_again(path, watch, tmp_path):
    fuzz.place({str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}, tmp_path / "case")
    assert fuzz.verdict(path.parent.name, tmp_path / "case", watch) is None


@pytest.mark.parametrize("name", list(fuzz.READERS))
def test_damaged_files_give_documented_errors_and_do_nothing_else(name, watch):
    found = fuzz.fuzz(name, 40 * fuzz.SHARES[name], 1, watch)
    assert [files[""] for files in found.values()] == []


def test_the_fuzzer_notices_a_crash_and_a_write(watch, tmp_path, monkeypatch):
    def writes(folder):
        (folder / "left").write_text("x")

    def crashes(folder):
        raise KeyError("x")

    for read in (writes, crashes):
        monkeypatch.setitem(fuzz.READERS, "bad", fuzz.Reader(fuzz.configs, read))
        assert fuzz.verdict("bad", tmp_path, watch) is not None
