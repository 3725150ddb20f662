"""What only a GPU shows, in under four minutes and without a network: speeds beside this machine's own peak, and bytes.

    make gpu-check                                            into bench/results/gpu-check.json
    python3 -m bench.gpu_check.run --out gpu-check.json       the same, from the project's root, with any torch
    python3 -m bench.gpu_check.run --dry-run                  the script itself, without a GPU; no speed is judged

Status 0: nothing failed. 1: something failed. 2: nothing was checked, as there is no CUDA device, or a package is
missing. docs/gpu-check.md says what each check means and how packages are brought along.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_check.rig import Result, Rig

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "dist" / "gpu-check-wheels"
_PASSED, _FAILED, _NOTHING_CHECKED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output when not given")
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="on the device cpu, with small blocks")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels to use (default: %(default)s)")
    options = parser.parse_args(arguments)
    with _packages(options.wheels):
        try:
            return _run(options)
        except ModuleNotFoundError as error:
            sys.stderr.write(f"nothing was checked: no package {error.name}; docs/gpu-check.md says how to bring it\n")
            return _NOTHING_CHECKED


def _run(options: argparse.Namespace) -> int:
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        built_for = torch.version.cuda or "no CUDA"
        sys.stderr.write(
            f"nothing was checked: torch {torch.__version__}, built for {built_for}, sees no CUDA device\n"
        )
        return _NOTHING_CHECKED
    started_s = time.perf_counter()
    results = list(_results("cpu" if options.dry_run else options.device, is_dry=options.dry_run))
    report = {
        "machine": _machine("cpu" if options.dry_run else options.device),
        "is_dry_run": options.dry_run,
        "took_s": round(time.perf_counter() - started_s, 1),
        "passed": not any(result.passed is False for result in results),
        "checks": [dataclasses.asdict(result) for result in results],
    }
    text = json.dumps(report, indent=2) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    return _PASSED if report["passed"] else _FAILED


def _results(device_name: str, *, is_dry: bool) -> Iterator[Result]:
    """Each as soon as it is known; told on standard error, too, as the JSON comes only at the end."""
    from bench.gpu_check.attach import check_attach
    from bench.gpu_check.kernels import check_codecs, check_pages
    from bench.gpu_check.link import check_measurement, check_registered, check_staging
    from bench.gpu_check.overlap import check_overlap
    from bench.gpu_check.rig import DRY_SIZES, GPU_SIZES, Rig
    from bench.gpu_check.rounds import check_agent, check_rounds

    rig = Rig(device_name, sizes=DRY_SIZES if is_dry else GPU_SIZES, is_dry=is_dry)
    for check in (
        check_rounds,
        check_agent,
        check_staging,
        check_registered,
        check_measurement,
        check_pages,
        check_codecs,
        check_overlap,
        check_attach,
    ):
        for result in _guarded(check, rig):
            sys.stderr.write(_line(result))
            yield result
    rig.device.close()


def _guarded(check: Callable[[Rig], Iterator[Result]], rig: Rig) -> Iterator[Result]:
    """A check that breaks down has failed, and the others go on."""
    from bench.gpu_check.rig import Result

    try:
        yield from check(rig)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what was to be found out
        sys.stderr.write(traceback.format_exc())
        yield Result(name=check.__name__, passed=False, figures={"error": f"{type(error).__name__}: {error}"[:500]})


def _line(result: Result) -> str:
    if result.skipped is not None:
        verdict = "skipped"
    else:
        verdict = {True: "passed", False: "FAILED", None: "-"}[result.passed]
    ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
    target = "" if result.target is None else f"of {result.target:.2f}"
    notes = result.skipped or ", ".join(f"{name} {value}" for name, value in result.figures.items())
    return f"{result.name:32} {verdict:8} {ratio:>6} {target:8} {notes}\n"


def _machine(device_name: str) -> dict[str, str]:
    import torch

    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()}
    if device_name != "cpu":
        properties = torch.cuda.get_device_properties(device_name)
        machine |= {
            "gpu": properties.name,
            "gpu_memory": f"{properties.total_memory >> 20} MiB",
            "cuda": str(torch.version.cuda),
        }
    return machine


@contextmanager
def _packages(wheels: Path) -> Iterator[None]:
    """This checkout and what is in these wheels can be imported, before what the machine has of the same names."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path[:0] = [str(ROOT), str(ROOT / "proto"), folder]
        yield


if __name__ == "__main__":
    sys.exit(main())
