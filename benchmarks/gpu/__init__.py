"""A kit for a GPU machine without network: it is packed here, carried there in loads, and run there.

    python -m benchmarks.gpu pack DIR --data DATA --torch 2.11.0
    PYTHONPATH=DIR/load-1/code python -m benchmarks.gpu run DIR --seconds 560 --only promises,times

A section is a file here with a function ``measurements(bench, results)``. It yields measurements; each finished one is written
to ``DIR/results/SECTION.json`` at once, so that an interrupted run resumes there. docs/scaling.md shows the results in
``benchmarks/results/gpu/``.
"""
