"""The process that measures, one per number of threads. It reads a plan from stdin and writes one JSON event per line:
`doing` names the case and implementation that a crash would be blamed on, `row` is a result, `abort` ends the run.

All implementations run in this one process, in turns, so that what disturbs one round disturbs all of them alike."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks import gate, inputs, measure
from benchmarks.registry import BY_NAME, OURS, Case, Implementation, PeerMissing, implementations
from benchmarks.rows import CRASHED, FAILED, MISSING, OK, SKIPPED, WRONG, Limits, predict, row, timed

ENOUGH_FOR_A_SAMPLE = 1.0
"""A first call of this many seconds counts as a sample: warming up is lost in it."""


@dataclass
class Running:
    """An implementation while its case is measured."""

    implementation: Implementation
    call: Callable
    nmse: float | None
    first: measure.Peak
    samples: list[float] = field(default_factory=list)
    calls_per_sample: int = 1
    spent: float = 0.0

    def wants_more(self, limits: Limits) -> bool:
        if self.first.seconds >= limits.once or len(self.samples) >= limits.rounds:
            return False
        return len(self.samples) < limits.min_samples or self.spent < limits.budget


class Worker:
    def __init__(self, plan: dict, emit: Callable[..., None]):
        self.threads = plan["threads"]
        self.names = tuple(plan["names"])
        self.limits = Limits(**plan["limits"])
        self.blamed = {(key, name): reason for key, name, reason in plan["blamed"]}
        self.done = plan["done"]
        self.emit = emit
        self.gates: dict[tuple, float | dict] = {}
        self.load = measure.OtherLoad()

    def run(self, cases: list[Case]) -> None:
        for case in cases:
            self.measure(case)

    def measure(self, case: Case) -> None:
        self.load.restart()
        tensors = inputs.make(case)
        running = []
        for implementation in implementations(case, self.names):
            started = self.start(case, implementation, tensors)
            if started is not None:
                running.append(started)
        self.take_turns(case, running)
        surroundings = {"load_average": os.getloadavg()[0], "other_cores": round(self.load.cores(), 3)}
        for one in running:
            self.result(
                case,
                one.implementation,
                OK,
                **timed(one.samples),
                calls_per_sample=one.calls_per_sample,
                nmse=one.nmse,
                extra_bytes=one.first.extra_bytes,
                **surroundings,
            )

    def start(self, case: Case, implementation: Implementation, tensors: inputs.Inputs) -> Running | None:
        """Everything before the rounds: the reasons not to run, the gate, and the first call with its peak memory."""
        name = implementation.name
        if (case.key, name) in self.blamed:
            return self.result(case, implementation, CRASHED, self.blamed[case.key, name])
        reason = predict(case, name, self.done, self.limits)
        if reason is not None:
            return self.result(case, implementation, SKIPPED, reason)
        self.emit(event="doing", case=case.key, implementation=name)
        try:
            prepare = implementation.load()
            nmse = self.pass_gate(case, implementation, prepare) if implementation.checked else None
            call = prepare(case, tensors)
            first = measure.first_call(call)
        except PeerMissing as missing:
            return self.refuse(case, implementation, MISSING, str(missing))
        except gate.Wrong as wrong:
            return self.refuse(case, implementation, WRONG, str(wrong))
        except Exception as error:
            return self.refuse(case, implementation, FAILED, describe(error))
        started = Running(implementation, call, nmse, first)
        if first.seconds >= ENOUGH_FOR_A_SAMPLE:
            started.samples.append(first.seconds)
            started.spent = first.seconds
        return started

    def pass_gate(self, case: Case, implementation: Implementation, prepare: Callable) -> float:
        key = gate.gate_case(case), implementation.name
        if key not in self.gates:
            self.gates[key] = gate.check(prepare, case)
        return self.gates[key]

    def take_turns(self, case: Case, running: list[Running]) -> None:
        active = [one for one in running if one.wants_more(self.limits)]
        while active:
            for one in active:
                self.emit(event="doing", case=case.key, implementation=one.implementation.name)
                expected = one.samples[-1] if one.samples else one.first.seconds
                seconds, one.calls_per_sample = measure.sample(one.call, expected)
                one.samples.append(seconds)
                one.spent += seconds * one.calls_per_sample
            # Another one begins the next round: nobody always runs in the wake of the same neighbour.
            active = [one for one in active[1:] + active[:1] if one.wants_more(self.limits)]

    def refuse(self, case: Case, implementation: Implementation, status: str, reason: str) -> None:
        self.result(case, implementation, status, reason)
        if implementation.name == OURS:
            self.emit(event="abort", reason=f"{case.key}: {BY_NAME[OURS].label} is {status}: {reason}")
            raise SystemExit(1)

    def result(self, case: Case, implementation: Implementation, status: str, reason: str = "", **values) -> None:
        record = row(case, implementation.name, self.threads, status, reason, **values)
        self.done.append(record)
        self.emit(event="row", row=record)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def main() -> None:
    plan = json.load(sys.stdin)
    events, sys.stdout = sys.stdout, sys.stderr  # what the peers print must not mix with the events

    def emit(**event) -> None:
        print(json.dumps(event), file=events, flush=True)

    torch.set_num_threads(plan["threads"])
    Worker(plan, emit).run([Case(**record) for record in plan["cases"]])


if __name__ == "__main__":
    main()
