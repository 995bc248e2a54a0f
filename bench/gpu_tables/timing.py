"""Times calls on a GPU in the three ways that the tables name; on a CPU (a rehearsal of the script) by the wall clock.

steady: back to back, contestants in turns of 0.2 s on a card that is warm already: the rate under its power limit.
bench: one call at a time behind a write that empties the L2, the median, as triton.testing.do_bench does.
graph: calls captured one after another in a CUDA graph, what a launch costs in an engine's decode step.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from gpu_tables.clock import SmClock

FLUSH_BYTES = 256 << 20  # several times any L2
ROUNDS = 2


@dataclass(frozen=True)
class Time:
    seconds: float  # a call
    clock_mhz: float | None = None  # of the SMs; None: not measured


class Timer:
    def __init__(self, device, seconds, clock):
        """seconds: of one turn of a steady measurement. clock: an SmClock or None."""
        self.device = torch.device(device)
        self.seconds, self.clock = seconds, clock
        self.on_gpu = self.device.type == "cuda"
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.uint8, device=self.device)

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def steady(self, calls):
        """{name: call} -> {name: Time}. The turns alternate, so that none is timed on a cooler card than another."""
        counts = {name: self._calls_a_turn(call) for name, call in calls.items()}
        turns = {name: [] for name in calls}
        first = next(iter(calls))
        self._turn(calls[first], counts[first])  # warms the card up
        for _ in range(ROUNDS):
            for name, call in calls.items():
                self._turn(call, counts[name] // 8 + 1)
                turns[name].append(self._turn(call, counts[name]))
        return {name: _mean(times) for name, times in turns.items()}

    def bench(self, call, repetitions=11):
        call()
        if not self.on_gpu:
            return Time(statistics.median(self._elapsed(call, 1) for _ in range(repetitions)))
        pairs = [_events() for _ in range(repetitions)]
        for begin, end in pairs:
            self.flush.zero_()
            begin.record()
            call()
            end.record()
        self.synchronize()
        return Time(statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3)

    def graph(self, calls, launches=20, repetitions=9):
        """Seconds a launch of a graph whose launch i is calls[i % len(calls)]."""
        order = [calls[i % len(calls)] for i in range(launches)]
        if not self.on_gpu:
            return Time(self._elapsed(lambda: [call() for call in order], repetitions) / launches / repetitions)
        for call in calls:  # compiles and allocates before the capture
            call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in order:
                call()
        graph.replay()
        pairs = [_events() for _ in range(repetitions)]
        for begin, end in pairs:
            begin.record()
            graph.replay()
            end.record()
        self.synchronize()
        return Time(statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3 / launches)

    def _calls_a_turn(self, call):
        call()
        return max(3, int(self.seconds * 3 / self._elapsed(call, 3)) + 1)

    def _turn(self, call, count):
        if not self.on_gpu:
            return Time(self._elapsed(call, count) / count)
        begin, end = _events()
        begin.record()
        before = self.clock.read() if self.clock else None
        for _ in range(count):
            call()
        after = self.clock.read() if self.clock else None
        end.record()
        self.synchronize()
        return Time(begin.elapsed_time(end) * 1e-3 / count, SmClock.mhz(before, after) if self.clock else None)

    def _elapsed(self, call, count):
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return max(time.perf_counter() - start, 1e-9)


def _events():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _mean(times):
    clocks = [time.clock_mhz for time in times if time.clock_mhz is not None]
    seconds = statistics.mean(time.seconds for time in times)
    return Time(seconds, statistics.mean(clocks) if clocks else None)
