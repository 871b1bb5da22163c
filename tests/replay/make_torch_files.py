"""Writes the `.pt` files of tests/replay/data with torch, in the shapes of SGLang's recorder.

    python tests/replay/make_torch_files.py tests/replay/data

Needs torch, which the tests do not; so the files are kept, and this says how they were made.
"""

import sys
from pathlib import Path

import torch

LAYERS, EXPERTS, PHYSICAL, TOKENS, TOP_K = 3, 8, 10, 5, 2


def main(folder: Path) -> None:
    """Deterministic files: one of stat mode, and one a rank of per_pass and per_token."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    count = torch.randint(0, 50, (4, LAYERS, EXPERTS), dtype=torch.int32)
    count[:, 0] = 0  # a dense layer
    count[3] = 0  # unused buffer
    stat = {"rank": 0, "logical_count": count, "average_utilization_rate_over_window": 0.5}
    torch.save(stat, folder / "stat.pt")
    table = torch.stack(
        [torch.cat([torch.arange(EXPERTS), torch.tensor([i, 7])]) for i in range(LAYERS)]
    )
    for mode in ("per_pass", "per_token"):
        for rank in range(2):
            records = [record(mode, forward, rank) for forward in range(3)]
            content = {"records": records, "last_physical_to_logical_map": table}
            torch.save(content, folder / f"{mode}_{rank}.pt")


def record(mode: str, forward: int, rank: int) -> dict:
    """One forward pass of a rank."""
    head = {"forward_pass_id": forward, "rank": rank, "gatherer_key": "primary"}
    head["global_physical_count"] = torch.randint(0, 9, (LAYERS, PHYSICAL), dtype=torch.int32)
    if mode == "per_pass":
        return head
    buffer = torch.randint(0, PHYSICAL, (LAYERS, 2 * TOKENS, TOP_K), dtype=torch.int32)
    buffer[:, TOKENS - 1, 1] = -1
    # A slice, as the recorder takes it of its buffer: its storage is larger.
    return head | {"input_ids": list(range(TOKENS)), "topk_ids_of_layer": buffer[:, :TOKENS]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
