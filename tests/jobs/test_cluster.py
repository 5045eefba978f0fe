"""Units on a cluster: their resources, the transfer of their files, and a node that dies without changing the results."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forgetfree import cli
from forgetfree.errors import UsageError
from forgetfree.jobs import cluster
from forgetfree.jobs.cluster import Place, check_cluster, read_files, replace_files
from forgetfree.jobs.run_directory import LOCK, Unit
from forgetfree.results.run_folder import RECORD
from forgetfree.training.monitor import Monitor


@pytest.fixture(autouse=True)
def where_it_was() -> Iterator[None]:
    """Restore the threads and the working directory, which units on a node change."""
    threads, directory = torch.get_num_threads(), Path.cwd()
    yield
    torch.set_num_threads(threads)
    os.chdir(directory)


def test_nodes_compute_under_the_variables_of_this_process_and_learn_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if not name.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    given = {"OMP_NUM_THREADS": "8", "ONEDNN_MAX_CPU_ISA": "AVX2", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret"}
    given |= (waiting := {"OMP_WAIT_POLICY": "PASSIVE"})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    common = {"OMP_NUM_THREADS": "2", "ONEDNN_MAX_CPU_ISA": "AVX2"} | waiting
    cpu, gpu = Place("cpu", 2), Place("cuda", 2)
    assert (cpu.variables, gpu.variables) == (common | {"CUDA_VISIBLE_DEVICES": ""}, common)
    assert [place.resources for place in (cpu, gpu)] == [{"num_cpus": 2, "num_gpus": count} for count in (0, 1)]


def test_addresses_are_taken_as_ray_writes_them_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: object())
    for address in ("ray", "ray://head:10001", "ray://192.0.2.7:10001", "ray://[2001:db8::7]:10001"):
        check_cluster(address)
    for address in ("Ray", "ray:", "ray://host", "ray://host:port", "ray://a b:1"):
        with pytest.raises(UsageError, match="--jobs must be a number, auto, ray or ray://HOST:PORT, got "):
            check_cluster(address)


def test_without_ray_it_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert cli.main(["graft", "sst2", "--data", "demo", "--jobs", "ray", "--out", str(tmp_path / "out")]) == 2
    assert "Ray, which is not installed. Install it with: pip install 'forgetfree[ray]'." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- Files -----------------------------------------------------------------------------------------------

FILES = {"history.jsonl": b"{}\n", "a/deep/one": bytes(range(256)), "empty": b"", ".checkpoint/state": b"\0"}


def test_a_folder_holds_the_files_that_came_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "unit"
    replace_files(folder, FILES)
    assert read_files(folder) == FILES
    later = {"history.jsonl": b"{}\n{}\n", "a/other": b"x", RECORD: b"{}"}
    replace_files(folder, later)
    assert read_files(folder) == later
    assert {path.name for path in folder.rglob("*") if path.is_dir()} == {"a"}


class Told:
    """Records the messages of a unit, in place of Ray's queue."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.actor = SimpleNamespace(put_nowait=SimpleNamespace(remote=self.events.append))


def measured(unit: Unit, monitor: Monitor) -> None:
    """Do the work of a unit: double the number in its folder."""
    before = (unit.directory / "number").read_text() if (unit.directory / "number").exists() else "1"
    with monitor.phase("sst2", "train", 3) as on_step:
        on_step(3, 0.5)
    (unit.directory / "number").write_text(str(2 * int(before)))


def test_a_unit_goes_on_from_the_files_it_had_and_sends_what_it_has_so_far(tmp_path: Path) -> None:
    key, told = {"strategy": "mine", "seed": 7}, Told()
    place = Place("cpu", 1, directory=tmp_path, kept=0)
    assert cluster._run(measured, key, {"number": b"21", "kept": b"k"}, place, told) == {"number": b"42", "kept": b"k"}
    assert {name for name, _ in told.events} == {"mine seed 7"}
    assert [event if isinstance(event, dict) else event.step for _, event in told.events] == [
        *(0, {"number": b"21", "kept": b"k"}),
        *(3, {"number": b"21", "kept": b"k"}),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_node_must_see_where_fine_tuned_models_are_shared(tmp_path: Path) -> None:
    place, key = Place("cpu", 1, seen=tmp_path / "out" / LOCK, directory=tmp_path), {"strategy": "mine", "seed": 0}
    with pytest.raises(
        UsageError,
        match=rf"cannot access {tmp_path / 'out'}, where .* Give --cache DIR, a directory that exists on every",
    ):
        cluster._run(measured, key, {"number": b"1"}, place, Told())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).touch()
    assert cluster._run(measured, key, {"number": b"1"}, place, Told()) == {"number": b"2"}


@pytest.mark.parametrize(("address", "cluster"), [("127.0.0.1:1", "ray"), ("", "ray://127.0.0.1:1")])
def test_a_cluster_that_does_not_answer_is_told_at_once(
    address: str,
    cluster: str,
    data_directory: Path,
    model_directory: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'forgetfree[ray]'")
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    given = ["--data", str(data_directory), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "1"]
    assert (
        cli.main(["graft", "sst2", *given, "--sparsity", "0.1", "--jobs", cluster, "--out", str(tmp_path / "out")]) == 1
    )
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"Cannot connect to the Ray cluster {address or cluster}: " in error and "refused" in error


# -- A cluster -------------------------------------------------------------------------------------------


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Yield a cluster with a head of one CPU, to which a node can be added, as processes of this machine."""
    simulated = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'forgetfree[ray]'")
    made = simulated.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def digests(out: Path) -> dict[str, str]:
    """Return the SHA-256 of all scores, ledgers, predictions and fine-tuned models."""
    kinds = ("scores.csv", "*.safetensors")
    found = [path for kind in kinds for path in out.rglob(kind)]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def watched(until: Callable[[], bool], then: Callable[[], object]) -> threading.Thread:
    """Start a thread that calls ``then`` as soon as ``until`` is true."""

    def watch() -> None:
        while not until():
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def careful(note: str, *given: Any) -> Any:
    """Run a unit on a node with a checkpoint after every step, and note at which step its phases start."""
    from forgetfree.jobs import checkpoints, cluster

    begin = checkpoints.FileCheckpoint.begin

    def noting(self: Any, steps: int, *state: Any) -> int:
        done = begin(self, steps, *state)
        with open(note, "a", encoding="utf-8") as file:
            file.write(f"{done} {steps}\n")
        return done

    checkpoints.INTERVAL, checkpoints.SHARE = 0.0, math.inf
    checkpoints.FileCheckpoint.begin = noting  # type: ignore[method-assign]
    try:
        return cluster._run(*given)
    finally:
        checkpoints.FileCheckpoint.begin = begin  # type: ignore[method-assign]


@pytest.mark.sampled(share=0.1)
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of Ray
def test_a_node_that_dies_changes_nothing(
    data_directory: Path, model_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two nodes is killed during a phase: the unit is resumed on the other from a copy of its checkpoint."""
    given = ["run", "qnli,sst2", "--data", str(data_directory), "--model", str(model_directory("bert"))]
    given += ["--threads", "1", "--readout", "linear", "--shots", "8", "--seed", "0", "--seed", "1"]
    given += ["--strategy", "grafting-continual"]
    given += ["--steps", "20", "--sparsity", "0.1", "--set", "mask_steps=400", "--out"]
    assert cli.main([*given, str(tmp_path / "one")]) == 0
    out, note = tmp_path / "two", tmp_path / "note"
    with two_nodes() as nodes:
        other = nodes.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        found: list[str] = []
        register = pytest.importorskip("ray").cloudpickle.register_pickle_by_value
        register(sys.modules[__name__])  # no node can import this module
        monkeypatch.setattr(cluster, "_run", lambda *given: careful(str(note), *given))
        monkeypatch.setattr(cluster, "Place", partial(Place, kept=0.5))

        def ready() -> bool:
            """Return whether checkpoints of both units, each in its first task, have arrived here."""
            kept = Counter(path.parent for path in out.glob("*/seed-*/.checkpoint/*.safetensors"))
            return [count >= 2 for count in kept.values()] == [True, True]

        def kill() -> None:
            found.extend(path.name for path in out.rglob(RECORD))
            nodes.remove_node(other, allow_graceful=False)

        killer = watched(ready, kill)
        assert cli.main([*given, str(out), "--jobs", "ray"]) == 0
        killer.join(timeout=10)
        assert not killer.is_alive() and found == []
    assert digests(out) == digests(tmp_path / "one")
    assert len(digests(out)) == 2 * 3 + 4
    begun = [line.split() for line in note.read_text().splitlines()]
    assert any(0 < int(done) < int(steps) for done, steps in begun)
