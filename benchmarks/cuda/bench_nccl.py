"""ncclBroadcast between two GPUs as programs call it: torch.distributed, a process a GPU.

    python3 benchmarks/cuda/bench_nccl.py

Prints a JSON object a line, timed as bench_replication.cu times: ten calls back to back between two
events, the slower rank, the median of nine. Needs torch with two GPUs; creates no multicast object.
"""

import json
import os
import statistics
import tempfile

SIZES_MIB = (1, 10, 36, 126, 264)
NUM_CALLS, NUM_REPEATS = 10, 9


def time_broadcast(tensor, dist, torch) -> float:
    """Microseconds a call on this rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(NUM_CALLS):
        dist.broadcast(tensor, 0)
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / NUM_CALLS


def run(rank: int, rendezvous: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for mib in SIZES_MIB:
        tensor = torch.full((mib << 20,), 7 - rank, dtype=torch.uint8, device="cuda")
        dist.broadcast(tensor, 0)
        if not bool((tensor == 7).all()):
            raise SystemExit(f"rank {rank}: {mib} MiB arrived damaged")
        times = []
        for repeat in range(NUM_REPEATS + 1):
            mine = torch.tensor([time_broadcast(tensor, dist, torch)], device="cuda")
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if repeat > 0:
                times.append(mine.item())
        if rank == 0:
            us = statistics.median(times)
            row = {
                "bench": "copy",
                "method": "torch ncclBroadcast",
                "bundle_mib": mib,
                "us": round(us, 2),
                "gbps": round((mib << 20) / us / 1000, 1),
                "version": ".".join(map(str, torch.cuda.nccl.version())),
            }
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(os.path.join(folder, "rendezvous"),), nprocs=2)


if __name__ == "__main__":
    main()
