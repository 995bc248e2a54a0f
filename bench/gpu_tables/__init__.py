"""The tables of bench/gpu.py, a file each, and what they share: timing, layers, peers, report."""
