"""The SMs' clock over a stretch of work: cycles that passed on each SM, over the time that passed."""

import torch

# Cycle counters run on between kernels. The grid is several CTAs an SM, so that each SM writes its row.
TEXT = r"""
extern "C" __global__ void read_counters(unsigned long long* rows) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  rows[2 * sm] = clock64();
  rows[2 * sm + 1] = nanoseconds;
}
"""


class SmClock:
    def __init__(self, device):
        import cupy  # without it no clock is reported

        self.device, self.cupy = torch.device(device), cupy
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.kernel = cupy.RawKernel(TEXT, "read_counters")

    def read(self):
        """Counters at this place of the stream, [SMs, (cycles, nanoseconds)]."""
        rows = torch.zeros(self.num_sms, 2, dtype=torch.int64, device=self.device)
        with self.cupy.cuda.ExternalStream(torch.cuda.current_stream(self.device).cuda_stream):
            self.kernel((8 * self.num_sms,), (32,), (self.cupy.uint64(rows.data_ptr()),))
        return rows

    @staticmethod
    def mhz(before, after):
        """The mean over the stretch, of the median SM."""
        seen = (before[:, 0] > 0) & (after[:, 0] > 0)
        passed = (after - before)[seen].double()
        return (passed[:, 0] / passed[:, 1] * 1e3).median().item()
