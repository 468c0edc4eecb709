"""Mutants of the protocol: each is caught under every seed tried, where the right code passes. tests/mutants/run.py does more of them."""
from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from conftest import ROOT

SEEDS = range(1, 4)


def _run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["mutants_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _run()
mutants, mutate = run.mutants, run.mutate


@pytest.fixture(scope="module")
def bench() -> Iterator[object]:
    made = run.Bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as made:
        yield made


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_it_is_caught(bench, pool, mutant) -> None:
    row = run.judged(bench, mutant, SEEDS, pool)
    assert not row.problems, "\n".join(row.problems)
    assert row.caught.total() == len(SEEDS) and row.quiet.total() == (len(SEEDS) if mutant.quiet else 0)


def test_what_is_not_caught_is_a_failure(bench, pool) -> None:
    """The right code as a mutant: nothing is wrong with it, and that is a problem of each kind."""
    nothing = mutants.Mutant("nothing", "nothing", (), "twice", ("race", "fault"), "twice")
    row = run.judged(bench, nothing, range(1, 2), pool)
    assert len(row.problems) == 2 and all("not caught" in how for how in (*row.caught, *row.quiet)), row


def test_an_edit_that_does_not_fit_is_rotten(bench) -> None:
    for edits in ((("csrc", "no such text", "x"),), (("csrc", "    return 0;\n", "x"),), (("csrc/gate.c", "static int is_free(", "static int is_free("),)):
        with pytest.raises(mutate.Rotten):
            bench.package(mutants.Mutant("rotten", "", edits, "twice", ()))


@pytest.mark.parametrize(("said", "complained", "status", "late", "by", "wrong"), [
    ('{"wrong": null, "races": 0}', "", 0, False, "", False),
    ('{"wrong": null, "races": 2}', "simcuda: RACE: free of [1, +2) while another process has it imported, in allocation", 0, False, "race", False),
    ('{"wrong": ["bytes", "x"], "races": 1}', "simcuda: RACE: read of [1, +2) that nothing orders", 0, False, "race", True),
    ("", "simcuda: RACE: read of [1, +2) that nothing orders", -6, False, "race", True),
    ('{"wrong": ["error", "x"], "races": 0}', "simcuda: fault 700: copy from unmapped memory at 0x12", 0, False, "fault", True),
    ('{"wrong": ["bytes", "x"], "races": 0}', "", 0, False, "bytes", True),
    ("", "", -9, True, "deadline", True),
    ("", "Traceback\nSyntaxError", 1, False, "error", True),
])
def test_the_judge(said, complained, status, late, by, wrong) -> None:
    seen = run.judge(said, complained, status, late)
    assert (seen.by, seen.wrong) == (by, wrong)


def test_the_page_has_every_mutant() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = page.split("## Mutants")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", section, re.M)
    assert rows == [(m.name, m.breaks) for m in mutants.MUTANTS]


def test_scenarios_are_there() -> None:
    text = (ROOT / "tests" / "mutants" / "scenarios.py").read_text(encoding="utf-8")
    for m in mutants.MUTANTS:
        for name in {m.scenario, m.quiet} - {""}:
            assert f"def {name}(scene" in text, name
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS)
