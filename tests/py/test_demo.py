"""The commands `demo` and `bench`: in every world that a stranger may start them in, and what they say when something is wrong."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest
from conftest import ROOT, Run

import cbuild

KEYS = {"direction", "nbytes", "rung", "reason", "cold_us", "warm_us", "verified"}


def command(python: object, *arguments: str, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COMFY_ZEROCOPY", "ZCX_", "PYTHON", "SIMCUDA"))}
    done = subprocess.run([str(python), "-m", "comfy_zerocopy", *arguments], cwd=ROOT, env={**clean, **env}, check=False,
                          capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is ok, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Python with nothing installed: the package is found in the folder it is started in."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture
def simulated(tmp_path: pathlib.Path) -> dict[str, str]:
    return {"ZCX_LIBCUDA": str(cbuild.simcuda()), "SIMCUDA_DIR": str(tmp_path)}


def check(found: dict, rungs: list[str]) -> None:
    assert set(found) == {"ok", "version", "device", "transfers"} and found["ok"] is True and isinstance(found["device"], str)
    assert [t["rung"] for t in found["transfers"]] == rungs
    assert [t["direction"] for t in found["transfers"]] == ["input", "result", "input"] * (len(rungs) // 3)
    for t in found["transfers"]:
        assert set(t) == KEYS and t["verified"] is True and t["nbytes"] > 0 and t["cold_us"] > 0 and t["warm_us"] > 0
    image, versions, again = found["transfers"][:3]
    assert versions["nbytes"] == again["nbytes"] == 3 * image["nbytes"]
    # Ordinary memory is copied once and says so; results, and results that go in again, never.
    assert "ordinary memory" in image["reason"] and versions["reason"] == again["reason"] == ""


def test_demo_here() -> None:
    """With whatever tensors this environment has."""
    check(json.loads(command(sys.executable, "demo", "--json", ZCX_LIBCUDA="/nonexistent").stdout), ["host"] * 3)


def test_demo_with_nothing_installed(bare: pathlib.Path) -> None:
    found = json.loads(command(bare, "demo", "--json", ZCX_LIBCUDA="/nonexistent").stdout)
    check(found, ["host"] * 3)
    assert found["device"] == "CPU"


def test_demo_over_a_pool(bare: pathlib.Path, simulated: dict[str, str]) -> None:
    found = json.loads(command(bare, "demo", "--json", **simulated).stdout)
    check(found, ["host"] * 3 + ["pool"] * 3)
    assert found["device"].startswith("cuda:0 ") and all(t["reason"] == "" for t in found["transfers"][3:])


def test_demo_fits_one_screen(bare: pathlib.Path, simulated: dict[str, str]) -> None:
    lines = command(bare, "demo", **simulated).stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    said = "\n".join(lines)
    for part in ("host: copied (1)", "host: shared", "pool: shared", "(1) copied, because it is ordinary memory", "Verified:"):
        assert part in said, said


def test_demo_says_when_the_bytes_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from comfy_zerocopy import demo, demo_worker

    np = pytest.importorskip("numpy")
    monkeypatch.setattr(demo, "look", lambda: demo.Here("numpy", np, None, "CPU", ""))
    process = demo_worker.process

    def other(image: object, out: object) -> None:
        process(image, out)
        out[0, 3, 5, 0] += np.float32(1e-6)  # type: ignore[index]

    monkeypatch.setattr(demo_worker, "process", other)  # in this process only
    assert demo.main(False) == 1
    said = capsys.readouterr().out
    assert "NOT verified" in said and said.count("  NO") == 2  # what it returned, and what it then read
    assert demo.main(True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and [t["verified"] for t in found["transfers"]] == [True, False, False]


@pytest.mark.parametrize(("prelude", "says"), [
    ("sys.modules['comfy_zerocopy._zcx'] = None", "pip install"),
    ("sys.platform = 'win32'; [delattr(os, n) for n in ('memfd_create', 'pidfd_open', 'pipe2', 'uname', 'register_at_fork', 'geteuid')]",
     "off on Windows"),
])
def test_demo_where_no_worker_can_run(run: Run, prelude: str, says: str) -> None:
    code = "import concurrent.futures, importlib.metadata, subprocess, logging, os, sys\n" + prelude + "\n" \
           "from comfy_zerocopy import cli; sys.exit(cli.main(['demo'] + {} * ['--json']))"
    done = run(code.format(0), ok=False)
    assert done.returncode == 1 and says in done.stderr and "cannot run" in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = run(code.format(1), ok=False)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["ok"] is False and found["transfers"] == [] and says in found["error"]


def test_the_rendered_image_is_the_same_everywhere() -> None:
    from comfy_zerocopy import demo

    pixels = demo.landscape(60, 80)
    assert len(pixels) == 60 * 80 * 3 and 0 <= min(pixels) and max(pixels) <= 1
    assert pixels == demo.landscape(60, 80) and len(set(pixels)) > 5000  # a picture, not a pattern


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_what_the_worker_computes(library: str) -> None:
    """Against formulas written out for one pixel."""
    from comfy_zerocopy import demo, demo_worker

    module = pytest.importorskip(library)
    here = demo.Here(library, module, None, "CPU", "")
    plain = demo.landscape(30, 40)
    image = (module.frombuffer(plain, dtype=module.float32)).reshape(1, 30, 40, 3)
    out = demo.room_for(here, image)
    demo_worker.process(image, out)
    soft, sharp, tone = (float(out[k, 20, 20, 1]) for k in range(3))
    at = float(image[0, 20, 20, 1])
    mean = sum(float(image[0, y, x, 1]) for y in (19, 20, 21) for x in (19, 20, 21)) / 9
    assert abs(soft - mean) < 1e-6 and abs(sharp - min(1, max(0, 2 * at - mean))) < 1e-6 and abs(tone - at * at * (3 - 2 * at)) < 1e-6
    assert bool((out[0, 0] == image[0, 0]).all())
    slow = demo_worker._plain(plain.tobytes(), (1, 30, 40, 3))
    assert max(abs(a - b) for a, b in zip(slow, out.reshape(-1).tolist(), strict=True)) < 1e-6


# ---- bench ----


def test_bench_with_a_floor(bare: pathlib.Path, simulated: dict[str, str], tmp_path: pathlib.Path) -> None:
    floor = tmp_path / "floor"
    lines = [{"row": "host_rtt", "bytes": 0, "p50_us": 10.0}, {"row": "host_fd", "bytes": 1 << 20, "p50_us": 100.0},
             {"row": "gpu_sem", "bytes": 0, "p50_us": 20.0}, {"row": "gpu_pool", "bytes": 64 << 20, "p50_us": 50.0}]
    floor.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(line)}'\n" for line in lines))
    floor.chmod(0o755)
    found = json.loads(command(bare, "bench", "--json", "--floor", str(floor), **simulated).stdout)
    assert found["ok"] is True and found["floor"] == lines
    mib = 1 << 20
    assert [(r["row"], r["bytes"] // mib) for r in found["rows"]] == [
        ("null", 0), ("host", 1), ("shared", 1), ("host", 64), ("shared", 64), ("pool", 2), ("pool", 64), ("pool", 1024)]
    crossed = {(r["row"], r["bytes"] // mib): r.get("crossed") for r in found["rows"]}
    assert crossed["host", 64] == ["input host copied", "result host shared"]
    assert crossed["shared", 64] == ["input host shared", "result host shared"]
    assert crossed["pool", 1024] == ["input pool shared", "result pool shared"]
    assert all(0 < r["p50_us"] <= r["p99_us"] for r in found["rows"])
    p50 = {(r["row"], r["bytes"] // mib): r["p50_us"] for r in found["rows"]}
    assert {(r["row"], r["bytes"] // mib, r["floor"]): r["ratio"] for r in found["ratios"]} == {
        ("null", 0, "host_rtt"): round(p50["null", 0] / 10, 2), ("host", 1, "host_fd"): round(p50["host", 1] / 100, 2),
        ("shared", 1, "host_fd"): round(p50["shared", 1] / 100, 2), ("pool", 2, "gpu_sem"): round(p50["pool", 2] / 20, 2),
        ("pool", 64, "gpu_sem"): round(p50["pool", 64] / 20, 2), ("pool", 64, "gpu_pool"): round(p50["pool", 64] / 50, 2),
        ("pool", 1024, "gpu_sem"): round(p50["pool", 1024] / 20, 2)}


def test_percentiles() -> None:
    from comfy_zerocopy.bench import _percentile

    assert [_percentile([1.0, 2.0, 3.0, 4.0], s) for s in (0.25, 0.5, 0.99)] == [1.0, 2.0, 4.0] and _percentile([7.0], 0.5) == 7.0


@pytest.mark.parametrize(("script", "says"), [("exit 3", "status 3"), ("echo words", "JSON object"), ('echo \'{"row": 1}\'', "JSON object")])
def test_bench_with_a_bad_floor(tmp_path: pathlib.Path, script: str, says: str) -> None:
    floor = tmp_path / "floor"
    floor.write_text(f"#!/bin/sh\n{script}\n")
    floor.chmod(0o755)
    done = command(sys.executable, "bench", "--json", "--floor", str(floor), ok=False)
    assert says in json.loads(done.stdout)["error"] and "Traceback" not in done.stderr
