"""One point of the memory series, in a process of its own: peak resident memory of one call beyond its inputs and its
results. Reads a case, an implementation and a number of threads as JSON from stdin, writes the measured values.

A fresh process, because a used heap hides what a call takes. The op runs once at a small size first, so that libraries,
thread stacks and caches are there before the baseline; the inputs are written, so they are resident."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from benchmarks import inputs, measure
from benchmarks.registry import BY_NAME, CHUNK, Case


def point(case: Case, implementation: str) -> dict:
    prepare = BY_NAME[implementation].load()
    small = replace(case, T=CHUNK)
    prepare(small, inputs.make(small))()
    peak = measure.first_call(prepare(case, inputs.make(case)))
    return {"extra_bytes": peak.extra_bytes, "result_bytes": peak.result_bytes, "seconds": peak.seconds}


def main() -> None:
    request = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(request["threads"])
    print(json.dumps(point(Case(**request["case"]), request["implementation"])), file=answer)


if __name__ == "__main__":
    main()
