"""The parallel layouts over NCCL on two GPUs, held against one: python -m tests.two_gpu.run [PHASE ...] [--out DIR].

Starts two ranks that run the phases one after another; what comes of each run is printed, and written to DIR/PHASE.json
with the machine it ran on, as it is known. A rank that crashes or hangs is ended, and the ranks are started again for
what is left. At the end there is a table a layout; the exit code is 1 if anything in it is not as it should be, 2 if
there are no two GPUs. Without them the same runs over gloo (--tiny).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.two_gpu import cases
from tests.two_gpu.cases import LAYOUTS, METHODS, MOVED, ONE, PHASES, Options, Record

ROOT = Path(__file__).parents[2]
STARTS = 5
GRACE_S = 30  # of a rank after the other one has ended: more than a dead one's silence takes to be noticed


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.two_gpu.run", description=(__doc__ or "").partition("\n")[0],
        epilog="Phases: " + "; ".join(f"{name}: {phase.about}" for name, phase in PHASES.items()),
    )  # fmt: skip
    default = Options(out="results/two_gpu")
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"{', '.join(PHASES)}; all by default")
    parser.add_argument("--out", default=default.out, help="folder of the results (%(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="of the comparisons")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of the comparisons")
    parser.add_argument("--steps", type=int, default=default.steps, help="of the large shapes (%(default)s)")
    parser.add_argument(
        "--long-steps", type=int, default=default.long_steps,
        help=f"of {cases.LONG[1]} at the {cases.LONG[0]} shape, that nothing hangs (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="shapes of width 64, to try it without GPUs")
    given = parser.parse_args(arguments)
    for phase in given.phases:
        if phase not in PHASES:
            parser.error(f"phase {phase!r} given; there are {', '.join(PHASES)}")
    if given.tiny and given.out == default.out:
        parser.error("--tiny given without --out, but results/two_gpu is of GPUs")
    if not 2 <= given.steps <= given.long_steps:
        parser.error(f"--steps {given.steps} --long-steps {given.long_steps} given, but 2 <= steps <= long-steps")
    if given.tiny and (refused := [phase for phase in given.phases if PHASES[phase].needs_gpu]):
        parser.error(f"phase {refused[0]} given with --tiny, but it needs GPUs")
    all_phases = [phase for phase in PHASES if not (given.tiny and PHASES[phase].needs_gpu)]
    phases = tuple(phase for phase in all_phases if phase in given.phases or not given.phases)
    return Options(
        str(Path(given.out).resolve()), phases, tuple(given.layouts), tuple(given.methods), given.steps,
        given.long_steps, given.tiny,
    )  # fmt: skip


class Ranks:
    """The two processes of a start."""

    def __init__(self, told: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | os.environ
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        command = [sys.executable, "-m", "tests.two_gpu.worker", json.dumps(told)]
        self.processes = [
            subprocess.Popen(command, env=environment | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
            for rank in range(2)
        ]
        # Exit code and time of those that have ended.
        self.ended: dict[int, tuple[int, float]] = {}

    def wait(self, limit_s: float) -> bool:
        """Wait for both; whoever is left when time is up, or long after the other one has failed, is killed.

        Returns:
            Whether both ended well.
        """
        deadline = time.time() + limit_s
        try:
            while len(self.ended) < 2 and time.time() < deadline:
                time.sleep(0.05)
                for rank, process in enumerate(self.processes):
                    if rank not in self.ended and process.poll() is not None:
                        self.ended[rank] = process.returncode, time.time()
                        if process.returncode:
                            deadline = min(deadline, time.time() + GRACE_S)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return all(self.ended.get(rank, (1, 0))[0] == 0 for rank in range(2))


def read(options: Options) -> dict[str, dict[str, Any]]:
    """Result files by phase, as far as there are any."""
    files = {phase: Path(options.out) / f"{phase}.json" for phase in PHASES}
    return {phase: json.loads(file.read_text()) for phase, file in files.items() if file.exists()}


def records(result: dict[str, Any]) -> dict[str, Record]:
    """Records of a result file, by "layout/method"."""
    return {key: Record(**value) for key, value in result["records"].items()}


def judge(ranks: Ranks, phase: str, scratch: Path) -> Record:
    """What came of the run whose rank 1 was to have the fault of ``phase``."""
    folder, fault = scratch / phase, cases.FAULTS[phase]
    if not (folder / "fault").exists():
        return Record(failed="the run did not come to the step of the fault")
    log = folder / "run" / "log.txt"
    victim = ranks.processes[1].pid
    pattern = rf"(rank 1 on host \S+ \(pid {victim}\) {fault.said}, .*)"
    found = re.findall(pattern, log.read_text() if log.exists() else "")
    if ranks.ended.get(1, (0, 0))[0] != fault.code:
        return Record(failed=f"rank 1 was to end with code {fault.code}, and did with {ranks.ended.get(1)}")
    if 0 not in ranks.ended:
        return Record(failed=f"rank 0 went on for {GRACE_S} s after the end of rank 1")
    code, when = ranks.ended[0]
    seconds = when - float((folder / "fault").read_text())
    if code != 1 or len(found) != 1:
        return Record(failed=f"rank 0 ended with code {code}, and said of the other one {found}")
    note = f"rank 0 ended {seconds:.1f} s after the fault: {found[0]}"
    if seconds > fault.within_s:
        return Record(failed=f"{note}; allowed are {fault.within_s} s")
    return Record(note=note)


def run(options: Options) -> None:
    """Start ranks until every phase has its results, or has failed."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    before = read(options)
    for phase, result in read(options).items():
        if phase in options.phases:  # other layouts of the phase stay
            asked = cases.expected(options, phase)
            asked += [f"{ONE}/{name.partition('/')[2]}" for name in asked]
            result["records"] = {key: value for key, value in result["records"].items() if key not in asked}
            (out / f"{phase}.json").write_text(json.dumps(result))
    faults = [phase for phase in options.phases if phase in cases.FAULTS]
    with tempfile.TemporaryDirectory(prefix="mhar-two-gpu-") as folder:
        for start in range(1, STARTS + 1):
            done = {phase: list(result["records"]) for phase, result in read(options).items()}
            ranks = Ranks({"options": asdict(options), "scratch": folder, "done": done})
            well = ranks.wait(60 + sum(PHASES[phase].limit_s for phase in options.phases))
            befallen = [phase for phase in faults if (Path(folder) / phase).exists()]
            for phase in befallen:
                faults.remove(phase)
                text = json.loads((out / f"{phase}.json").read_text())
                (begun,) = text["records"].values()
                begun |= asdict(judge(ranks, phase, Path(folder))) | {"made": begun["made"]}
                (out / f"{phase}.json").write_text(json.dumps(text))
            if befallen and faults:
                continue
            if befallen:
                return
            codes = {rank: code for rank, (code, _) in sorted(ranks.ended.items())}
            if cases.UNFIT in codes.values():
                for phase, result in before.items():
                    (out / f"{phase}.json").write_text(json.dumps(result))
                raise SystemExit(cases.UNFIT)
            if well:
                return
            print(f"Start {start} of at most {STARTS}: the ranks have ended with {codes}.", flush=True)


# --- tables -------------------------------------------------------------------------------------------------------


def table(layout: str, results: dict[str, dict[str, Any]]) -> tuple[Table, list[str]]:
    """Rows of every phase for a layout, and what is wrong in them."""
    rows = Table(title=layout, title_justify="left", box=box.SIMPLE_HEAD)
    columns = (
        "phase",
        "method",
        "steps",
        "first\nloss off",
        "losses\noff",
        "norms\noff",
        "gradients\noff",
        "\ntokens/s",
        "of the\nbaseline",
        "peak\nGiB",
        "of the\nbaseline",
        "sent a step,\nas planned",
        "",
    )
    for number, name in enumerate(columns):
        rows.add_column(name, justify="left" if number in (0, 1, len(columns) - 1) else "right", vertical="bottom")
    wrong: list[str] = []
    for phase, result in results.items():
        found = records(result)
        for key, record in found.items():
            place, method = key.split("/")
            if place != layout or phase in cases.FAULTS:
                continue
            one = found.get(f"{ONE}/{method}")
            bad = cases.faults(record, one, PHASES[phase].tolerance, pipelined=layout in cases.PIPELINES)
            cells = _cells(record, one, found.get(f"{layout}/baseline"))
            rows.add_row(phase, method, *cells, "WRONG" if bad else "ok")
            wrong += [f"{phase} {layout} {method}: {text}" for text in bad]
    return rows, wrong


def _cells(record: Record, one: Record | None, baseline: Record | None) -> list[str]:
    """Figures of a row; empty where there are none."""
    far = cases.distance(record, one) if record.losses and one is not None and one.losses else None
    speed, peak = record.tokens_per_second, record.peak_memory_bytes
    steps = max(len(record.losses), 1)
    messages, size = (sum(column) / steps for column in zip(*record.sent)) if record.sent else (0, 0)
    against = baseline.tokens_per_second if baseline is not None else None
    least = baseline.peak_memory_bytes if baseline is not None else None
    return [
        f"{len(record.losses)}" if record.losses else "",
        *([f"{far.first_loss:.1e}", f"{far.loss:.1e}", f"{far.norm:.1e}"] if far else ["", "", ""]),
        f"{record.gradient_error:.1e}" if record.gradient_error is not None else "",
        f"{speed:,.0f}" if speed else "",
        f"{speed / against:.2f}" if speed and against else "",
        f"{peak / 2**30:.2f}" if peak else "",
        f"{peak / least:.2f}" if peak and least else "",
        f"{messages:.0f}: {size / 2**20:,.1f} MiB" if messages and speed else "",
    ]


def report(options: Options) -> bool:
    """Print a table a layout; whether all that was asked for is there, and as it should be."""
    results = read(options)
    console = Console(width=None if sys.stdout.isatty() else 160)
    wrong = [
        f"{phase} {name.replace('/', ' ')}: no result"
        for phase in options.phases
        for name in cases.expected(options, phase)
        if name not in results.get(phase, {"records": {}})["records"]
    ]
    machine: dict[str, Any] = next((found["machine"] for found in results.values() if found.get("machine")), {})
    console.print(f"{machine.get('num_devices')} x {machine.get('device')}, driver {machine.get('driver')}, "
                  f"commit {machine.get('commit')}, {machine.get('versions')}", highlight=False)  # fmt: skip
    for layout in (*LAYOUTS, MOVED):
        rows, bad = table(layout, results)
        if rows.row_count:
            console.print(rows)
        wrong += bad
    for phase in cases.FAULTS:
        for record in records(results[phase]).values() if phase in results else ():
            console.print(record.note or record.failed, highlight=False)
            wrong += [f"{phase}: {record.failed}"] if record.failed else []
    for text in wrong:
        console.print(f"WRONG: {text}", highlight=False, markup=False)
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; the exit code."""
    options = parse(arguments)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options)
    except KeyboardInterrupt:
        print("Stopped by a signal; this is what there is so far.", flush=True)
    well = report(options)
    print(f"{'All is as it should be' if well else 'Not all is as it should be'}; it took "
          f"{time.monotonic() - began:.0f} s. Results: {options.out}", flush=True)  # fmt: skip
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
