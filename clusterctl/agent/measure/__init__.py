"""Measures the devices of a node and the network between nodes, in the workers' own Python, with torch alone.

This is the program of a deep check: each rank of a run runs `python -m _clusterctl_measure SETTINGS`. `inject` puts
this folder into the Python path of workers. SETTINGS is one JSON object:

    {"mark": text before each line of the program,
     "share": share of the free memory to test,
     "repeats": number of GEMMs whose bits are compared,
     "window_s": seconds of each timing,
     "limit_s": seconds that a step may last,
     "start_limit_s": seconds until all ranks have imported torch,
     "rounds": [[[node rank, ...], ...], ...]}    the groups of nodes that make an all-reduce at the same time

Each rank is a guard, which has no torch, and its child, which measures. A bad card may kill or hang the child. The
guard ends a child that is too slow, reports its last step, and exits with 0, so that the run continues for the other
ranks. The guard of rank 0 has a second child: the store by which the ranks meet.

Results are lines of JSON after the mark in the output of the rank. Each has `rank`, `step` and `t` (wall clock), and:

    context   device: "cuda" | "cpu", model, kind (equal for devices that must compute equal bits), uuid, memory_bytes
    memory    tested_bytes, wrong: number of 8-byte words that were not read as written
    bits      dtype, digest (of the first result of a GEMM), repeats, wrong: number of results with other bits
    gemm      kind: dtype, rate: operations per second, cpu_s: CPU seconds of the rank, began: wall clock
    copy      kind: "memory" | "to_device" | "from_device", rate: bytes per second, cpu_s, began
    round     round, group: [node rank], ranks: number, bytes, seconds (the best), median_s, repeats, backend,
              algorithm, protocol; with `reason`, this rank could not finish the round
    failed    during: step, round: number or null, reason, is_late: the step took too long

A line with `begin`, `limit_s` and perhaps `round` says that a step begins. There are three lines `gemm` and `copy` of
each kind; their windows alternate, and all ranks work at once.
"""
