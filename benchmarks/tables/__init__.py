"""Tables and figures of README and docs, made of the files in `benchmarks/results`: `python -m benchmarks.tables`."""
