"""The commands ``pack`` and ``run`` of the kit."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu.unpacking import unpack
from forgetfree.errors import ForgetfreeError

PROGRAM = "python -m benchmarks.gpu"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(prog=PROGRAM, description="A kit for a machine with a GPU that reaches no network.")
    commands = whole.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="gather what a run needs there, in loads of 56 MB")
    pack.add_argument("directory", metavar="DIR", type=Path, help="of the kit; its loads are written anew")
    pack.add_argument("--data", type=Path, help="a folder for each task; without it, real rows are left out")
    pack.add_argument("--python", default="3.12", help="the version of Python there (default: 3.12)")
    pack.add_argument("--torch", default="2.11.0", help="the version of PyTorch there (default: 2.11.0)")
    pack.add_argument("--no-wheels", action="store_true", help="leave packages and models out")
    run = commands.add_parser("run", help="measure, and go on where a run was cut off")
    run.add_argument("directory", metavar="DIR", type=Path, help="of the kit; an empty one, where all is installed")
    run.add_argument(
        "--seconds", type=float, default=560.0, help="nothing begins that would not end by then (default: 560)"
    )
    run.add_argument("--only", default="", metavar="SECTION,…", help="sections in their order (default: all)")
    run.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: a rehearsal, on any machine")
    run.add_argument("--results", type=Path, metavar="DIR", help="where json files are kept (default: DIR/results)")
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    begun, options = time.monotonic(), parser().parse_args(arguments)
    try:
        if options.command == "pack":
            from benchmarks.gpu.packing import pack

            print(pack(options.directory, options.data, options.python, options.torch, not options.no_wheels))
            return 0
        return _run(options, begun + options.seconds)
    except ForgetfreeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace, until: float) -> int:
    # Before torch is imported, which comes after the packages of the kit are found.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    missing = unpack(directory)
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.running import run_sections, sections_of
    from forgetfree.device import find_device

    names = sections_of(options.only)
    bench = Bench(torch.device(find_device("auto")), options.size == "tiny", directory)
    results = (options.results or directory / "results").resolve()
    return 0 if run_sections(bench, results, names, until, missing) else 1


if __name__ == "__main__":
    sys.exit(main())
