"""Times calls on a GPU in the three ways that the tables name; on a CPU (a rehearsal of the script) by the wall clock.

steady: back to back for 0.3 s or more, the rate under the card's power limit.
bench: one call at a time behind a write that empties the L2, the median, as triton.testing.do_bench does.
graph: calls captured one after another in a CUDA graph, what a launch costs in an engine's decode step.
"""

import statistics
import time
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # several times any L2


@dataclass(frozen=True)
class Time:
    seconds: float  # a call
    clock_mhz: int | None = None  # of the SMs, median over the measurement; None: NVML can't say


class Timer:
    def __init__(self, device, seconds=0.3):
        self.device = torch.device(device)
        self.seconds = seconds
        self.on_gpu = self.device.type == "cuda"
        self.read_clock = _clock_reader(self.device) if self.on_gpu else lambda: None
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.uint8, device=self.device)

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def steady(self, call):
        call()
        one = self._elapsed(call, 3) / 3
        for _ in range(max(1, int(self.seconds / 3 / one))):
            call()
        count = max(5, int(self.seconds / one) + 1)
        if not self.on_gpu:
            return Time(self._elapsed(call, count) / count)
        begin, end = _events()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        clocks = []
        while not end.query():
            clocks.append(self.read_clock())
            time.sleep(0.005)
        clocks = [clock for clock in clocks if clock is not None]
        return Time(begin.elapsed_time(end) * 1e-3 / count, int(statistics.median(clocks)) if clocks else None)

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

    def _elapsed(self, call, count):
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return max(time.perf_counter() - start, 1e-9)


def _events():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _clock_reader(device):
    """Reads the SM clock in MHz through nvidia-ml-py; without it there is none to report."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except Exception:  # not installed, or a device that hides its clock
        return lambda: None
    return lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
