"""tests/gpu/record.py: what it records is what happened, also when a step fails, hangs or shows nothing. tests/records.py: what the
page says of records is what they say."""
from __future__ import annotations

import hashlib
import json
import pathlib
import re
import sys
import time
from types import ModuleType

import pytest
from conftest import ROOT

import records


@pytest.fixture
def record() -> ModuleType:
    return records.gpu_record()


def test_hash_is_of_the_sources_and_of_nothing_else(record: ModuleType, tmp_path: pathlib.Path) -> None:
    held = {"setup.py": b"1", "pyproject.toml": b"2", "csrc/a.c": b"3", "csrc/a.h": b"", "comfy_zerocopy/x.py": b"4",
            "comfy_zerocopy/sub/y.pyi": b"5", "tests/gpu/t.py": b"6", "__init__.py": b"7", "prestartup_script.py": b"8"}
    other = {"README.md": b"9", "csrc/a.o": b"10", "comfy_zerocopy/_zcx.so": b"11", "tests/py/t.py": b"12"}
    for name, data in {**held, **other}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    whole = b"".join(name.encode() + b"\0" + held[name] + b"\0" for name in sorted(held))
    assert record.source_sha256(tmp_path) == hashlib.sha256(whole).hexdigest()
    (tmp_path / "csrc" / "a.h").write_bytes(b"!")
    assert record.source_sha256(tmp_path) != hashlib.sha256(whole).hexdigest()


def test_a_step_that_hangs_ends_with_all_that_it_started(record: ModuleType) -> None:
    started = time.monotonic()
    found, said = record.step(["sh", "-c", "echo before; sleep 1000 & sleep 1000"], 0.5)
    assert time.monotonic() - started < 60  # the one behind would keep the pipe open for a quarter of an hour
    assert found["ok"] is False and "not done within" in found["problem"] and said == "before\n"


def test_outcomes(record: ModuleType, tmp_path: pathlib.Path) -> None:
    def ran(text: str) -> dict:
        (tmp_path / "test_it.py").write_text("import pytest\n" + text)
        return record.tests([str(tmp_path / "test_it.py"), "-p", "no:randomly"], 60)

    found = ran("def test_a(): pass\ndef test_b(): assert 0, 'because'\ndef test_c(): pytest.skip('no card')\n")
    assert found["ok"] is False and found["count"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert [(t["test"].split("::")[1], t["outcome"]) for t in found["tests"]] == [
        ("test_a", "passed"), ("test_b", "failed"), ("test_c", "skipped")]
    assert "because" in found["tests"][1]["why"] and "no card" in found["tests"][2]["why"]
    found = ran("def test_c(): pytest.skip('no card')\n")
    assert found["ok"] is False and found["problem"] == "no test ran"  # a skip is not a proof
    assert ran("def test_a(): pass\n")["ok"] is True


@pytest.mark.parametrize(("failing", "why"), [(None, None), ("demo", None), ("tests/gpu", None), (None, "no driver")])
def test_the_record_is_whole_or_says_that_it_is_not(record: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path,
                                                   capsys: pytest.CaptureFixture[str], failing: str | None, why: str | None) -> None:
    facts = {"why": why} if why else {"card": "Some Card", "torch": "2.11", "cuda": "13.0"}
    monkeypatch.setattr(record, "_FACTS", f"print({json.dumps(json.dumps(facts))})")
    monkeypatch.setattr(record, "tests", lambda arguments, seconds: {"ok": arguments[0] != failing, "seconds": 1.0, "tests": [],
                                                                     "count": {"passed": 3, "failed": 0, "skipped": 0}})
    rows = [{"row": "null", "bytes": 0, "p50_us": 1.0}]
    monkeypatch.setattr(record, "command", lambda name, arguments: {
        "ok": name != failing, "seconds": 2.0, "output": {"rows": rows, "floor": [], "ratios": [1], "transfers": [2]}})
    status = record.main([str(tmp_path / "out.json"), "--floor", "floor"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert status == (0 if found["ok"] else 1) and found["ok"] is (failing is None and why is None)
    assert ("INCOMPLETE" in capsys.readouterr().out) is not found["ok"]
    assert found["card"] == facts.get("card") and found["source_sha256"] == record.source_sha256(ROOT)
    assert {"driver", "torch", "python", "date", "floor"} <= set(found) and found["python"] == sys.version.split()[0]
    assert (found["rows"], found["ratios"], found["transfers"]) == (rows, [1], [2])
    assert set(found["steps"]) == {"conformance", "gpu tests", "demo", "bench"}


# ---- the figures of docs/reliability.md ----


@pytest.mark.parametrize("name", records.TABLES)
def test_the_page_says_what_the_records_say(name: str) -> None:
    """After a new record: python tests/records.py --write"""
    assert records.written(records.PAGE.read_text(encoding="utf-8"), name) == f"\n{records.TABLES[name]()}\n"


def test_every_record_of_the_page_is_in_its_list() -> None:
    page = records.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"results/([\w-]+\.json)\)", page))
    assert named == set(re.findall(r"results/([\w-]+\.json)\)", records.sources())) >= {name for kind in records.KINDS for name, _ in records.load(kind)}


def test_figures_outside_the_tables_are_those_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there may be more of at the end, and what CI does."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "race")
    import mix

    slack = mix.SLACK
    page = re.sub(r"<!-- records: \w+ -->.*?<!-- end -->", "", records.PAGE.read_text(encoding="utf-8"), flags=re.S)
    for figure, text in ((slack["memory"] >> 20, "- {} MiB of own and"), (slack["shared memory"] >> 20, "and {} MiB of shared memory"),
                         (slack["allocated"] >> 20, "of which {} MiB and"), (f"{slack['python blocks']:,}", "and {} of Python's blocks"),
                         (slack["pool of"] >> 20, "- {} MiB in each pool"), (slack["vram of cuda:0 outside"] >> 20, "on a card {} MiB outside it"),
                         (mix.CARD["memory"] >> 20, "On a card {} MiB of each"), (mix.EVENTS, "- {} events for each arena")):
        assert text.format(figure) in page
    in_ci = (ROOT / "tests" / "py" / "test_race.py").read_text()
    assert '((100_000, "pool", 16 << 10), (10_000, "host", 256 << 10))' in in_ci and '"allocs", "--allocs", "100000"' in in_ci
    assert "100,000 calls on the simulated driver with tensors of at most 16 KiB, and 10,000 on the host" in page and "CI does it with 100,000" in page
