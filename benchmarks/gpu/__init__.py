"""A kit for a machine with a GPU that reaches no network: it is packed here, carried there in loads, and run there.

    python -m benchmarks.gpu pack DIR --data DATA --torch 2.11.0
    PYTHONPATH=DIR/load-1/code python -m benchmarks.gpu run DIR --seconds 560 --only promises,times

A section is a file here with a function ``measurements(bench, results)``. It yields measurements, and each that is finished is
written to ``DIR/results/SECTION.json`` at once, so that a run which is cut off goes on where it stopped. docs/scaling.md shows
what stands in ``benchmarks/results/gpu/``.
"""
