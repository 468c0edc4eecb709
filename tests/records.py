"""The tables of docs/reliability.md that hold figures: each is made from records in research/results, and stands between two marks.

    python tests/records.py             says which tables differ from the records, and which records are of other sources than these
    python tests/records.py --write     puts the tables on the page

The exit status is 1 if a table differs (without --write). A record of other sources is none of its faults: it says what those did.
"""
from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "research" / "results"
KINDS = ("allocs", "analysis", "fuzz", "kill", "mutants", "parent", "soak")  # what the names of their records begin with
MB = ("memory", "shared memory", "allocated", "pool", "arena", "vram")  # figures of these are bytes

Record = dict[str, Any]


def load(kind: str) -> list[tuple[str, Record]]:
    """(name, record) of one kind."""
    return [(p.name, json.loads(p.read_text(encoding="utf-8"))) for p in sorted(RESULTS.glob(f"{kind}-*.json"))]


def gpu_record() -> ModuleType:
    """tests/gpu/record.py, which stands alone: it knows how every record names the sources and the driver."""
    spec = importlib.util.spec_from_file_location("gpu_record", ROOT / "tests" / "gpu" / "record.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_sha256() -> str:
    """Of the sources as they are here."""
    return str(gpu_record().source_sha256(ROOT))


def older() -> list[str]:
    """The records that are not of the sources as they are here."""
    here = source_sha256()
    return [name for kind in KINDS for name, r in load(kind) if r["source_sha256"] != here]


# ---- how figures are written ----


def link(name: str) -> str:
    return f"[{name}](../research/results/{name})"


def number(n: float) -> str:
    return f"{n:,}"


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows)).replace("| ---", "|---").replace("--- |", "---|")


def commands(records: list[tuple[str, Record]]) -> str:
    return "\nMade by\n\n" + "".join(f"- {link(name)}: `{command(name, r)}`, in {r['seconds']:,.0f} s\n" for name, r in records)


def command(name: str, r: Record) -> str:
    return r.get("command") or f"python tests/mutants/run.py --seeds {r['seeds']} --json research/results/{name}"


def where(r: Record) -> str:
    return {"none": "host memory", "simulated": "simulated GPU memory", "card": f"GPU memory, {r.get('card')}"}[r["gpu"]]


def spread(ms: Record) -> str:
    return ", ".join(f"{ms[k]:,.0f}" for k in ("p50", "p99", "max")) if ms else "–"


def left(before: Record, after: Record) -> str:
    """What there is at the end, of what there was."""
    def said(name: str, *figures: int) -> str:
        what = {"shm": "in `/dev/shm`", "memory": "own memory"}.get(name, name)
        return f"{what} {' → '.join(map(megabytes if name.startswith(MB) else number, figures))}{' MB' if name.startswith(MB) else ''}"

    same = [said(name, n) for name, n in before.items() if after[name] == n]
    moved = [said(name, n, after[name]) for name, n in before.items() if after[name] != n]
    return f"the same: {', '.join(same)}; {', '.join(moved) or 'nothing else'}"


def quarters(samples: list[int]) -> str:
    """The most in each quarter of the run."""
    if not samples:
        return "–"
    return ", ".join(megabytes(max(samples[len(samples) * i // 4:len(samples) * (i + 1) // 4])) for i in range(4))


# ---- the tables ----


def kills() -> str:
    records = load("kill")
    rows = [[where(r), number(r["moments"]), number(r["moments_that_hit_a_call"]), number(r["worker_died"]), number(r["moments_that_left_a_child"]),
             number(r["calls"]), number(r["hangs"]), spread(r["kill_to_worker_died_ms"]), f"{r['bytes_compared'] / 1e9:.1f}",
             quarters(r.get("own_memory_over_moments", []))] for _, r in records]
    return (table(("tensors in", "moments", "that hit a call", "`WorkerDied`", "that left a child", "calls", "hangs", "ms from SIGKILL to `WorkerDied`: p50, p99, max",
                   "GB compared", "own memory, MB: the most in each quarter"), rows)
            + "\nAt the end, of what there was before:\n\n" + "".join(f"- {where(r)}: {left(r['before'], r['after'])}\n" for _, r in records)
            + commands(records))


def parents() -> str:
    records = load("parent")
    rows = [[where(r), end, number(n), spread(r["all_gone_ms"][end])] for _, r in records for end, n in r["moments"].items()]
    return (table(("tensors in", "end", "moments", "ms until nobody of the sessions lived: p50, p99, max"), rows)
            + "\n" + "".join(f"- {where(r)}: {number(r['counts']['processes'])} processes and {number(r['counts']['shared files'])} shared files were looked for; "
                             f"{number(r['counts'].get('left to the new program to reap', 0))} dead workers were left to a new program to reap; the device's "
                             f"memory was back within {spread(r['device_memory_back_ms'])} ms (p50, p99, max)\n" for _, r in records)
            + commands(records))


def soaks() -> str:
    records = load("soak")
    rows = [[where(r), number(r["devices"]) if r["gpu"] != "none" else "–", number(r["calls"]), ", ".join(f"{number(n)} {what}" for what, n in r["ended_by"].items()),
             number(r["calls_per_second"]), quarters(r["own_memory_over_time"])] for _, r in records]
    kinds = "".join(f"- {where(r)}: {', '.join(f'{number(n)} {kind}' for kind, n in r['calls_by_kind'].items())}\n" for _, r in records)
    return (table(("tensors in", "devices", "calls", "of which ended by", "calls a second", "own memory, MB: the most in each quarter"), rows)
            + "\nAt the end, of what there was after the warm-up:\n\n" + "".join(f"- {where(r)}: {left(r['before'], r['after'])}\n" for _, r in records)
            + "\nCalls by kind (the methods of `tests/race/mix.py` and `soak.py`):\n\n" + kinds + commands(records))


def allocs() -> str:
    records = load("allocs")
    said = {"read": "the answers are read by another thread", "not read": "they are not read; the call has a deadline",
            "not read, cancelled": "they are not read; the call is cancelled when all was asked for",
            "not read, no deadline": "they are not read; the call has no deadline"}

    def row(name: str, s: Record) -> list[str]:
        pending, ended, rise = s["pending_before_the_first_was_read"], s["ended_by"].split(": "), s["rise"]
        return [said[name], "–" if pending is None else number(pending), f"{int(ended[1]):,} results" if ended[0] == "int" else f"`{ended[0]}`",
                f"{s['seconds']:.1f}", megabytes(rise["memory"]), megabytes(rise["shared files"]), number(rise["descriptors"])]

    return (table((f"the worker's requests: {', '.join(number(r['allocs']) for _, r in records)}", "pending before the first was read", "the call ends with",
                   "after s, asking included", "more own memory, MB", "more in shared files, MB", "more descriptors"),
                  [row(name, s) for _, r in records for name, s in r["scenes"].items()])
            + "\n" + "".join(f"- at the end, of what there was before: {left(r['before'], r['after'])}\n" for _, r in records) + commands(records))


def mutants() -> str:
    sys.path.insert(0, str(ROOT / "tests" / "mutants"))
    import mutants as known

    on_card = {m.name for m in known.MUTANTS if m.card}
    (name, r), = load("mutants")

    def by(found: dict[str, int]) -> str:
        return "; ".join(f"{what} ({n})" for what, n in sorted(found.items(), key=lambda one: -one[1])) or "–"

    rows = [[f"`{m['mutant']}`", m["breaks"], by(m["caught"]), by(m.get("caught_there", {})), "yes" if m["mutant"] in on_card else "–"] for m in r["rows"]]
    whole = sum(not m["problems"] for m in r["rows"])
    return (table(("mutant", "what is broken", f"caught by (under how many of {r['seeds']} seeds)", "and where the bytes come out right, by", "on a card too"), rows)
            + f"\n{whole} of {r['mutants']} mutants, each under {r['seeds']} seeds of {r['seeds']}: {link(name)}, `{command(name, r)}`, in {r['seconds']:,.0f} s\n")


def fuzzers() -> str:
    rows = [[f"`{row['target']}`", number(row["executions"]), number(row["seconds"]), number(row["edges"]) if "edges" in row else "–", number(row["fatal"]), link(name)]
            for name, r in load("fuzz") for row in r["rows"]]
    order = {"`wire`": 0, "`codec`": 1, "`session`": 2, "`device`": 3}
    return (table(("fuzzer", "executions", "seconds", "edges", "fatal", "record"), sorted(rows, key=lambda row: order[row[0]]))
            + "\nMade by\n\n" + "".join(f"- {link(name)}: `{r['command']}`, {r['engine']}\n" for name, r in load("fuzz")))


def analyses() -> str:
    names = {"gcc": "gcc `-fanalyzer`", "tsan": "ThreadSanitizer of gcc", "asan": "AddressSanitizer and UBSan of gcc"}
    rows = [[f"{names.get(row['tool'], row['tool'])} {row['version']}", row["over"], number(len(row["found"])), number(row["explained"]), number(row["seconds"])]
            for _, r in load("analysis") for row in r["rows"]]
    return (table(("tool", "over", "found and not explained", "explained", "seconds"), rows)
            + "\n" + "".join(f"Made by `{r['command']}`: {link(name)}\n" for name, r in load("analysis")))


def sources() -> str:
    return table(("record", "date", "sources"), [[link(name), r["date"][:10], f"`{r['source_sha256'][:8]}`"] for kind in KINDS for name, r in load(kind)])


TABLES: dict[str, Callable[[], str]] = {"mutants": mutants, "kills": kills, "parents": parents, "soaks": soaks, "allocs": allocs, "fuzz": fuzzers, "analysis": analyses,
                                        "sources": sources}


def written(page: str, name: str) -> str:
    """What stands between the marks."""
    found = re.search(rf"<!-- records: {name} -->\n(.*?)<!-- end -->", page, re.S)
    if found is None:
        raise SystemExit(f"{PAGE} has no place for the table {name}")
    return found[1]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    other = [name for name, make in TABLES.items() if written(page, name) != f"\n{make()}\n"]
    if "--write" in sys.argv[1:]:
        for name in other:
            page = page.replace(f"<!-- records: {name} -->\n{written(page, name)}", f"<!-- records: {name} -->\n\n{TABLES[name]()}\n")
        PAGE.write_text(page, encoding="utf-8")
    print("tables that differed:", ", ".join(other) or "none")
    print("records of other sources:", ", ".join(older()) or "none")
    return int(bool(other) and "--write" not in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
