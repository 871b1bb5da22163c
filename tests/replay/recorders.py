"""Writes files of the shape that each recorder writes, from the same routed tokens.

Every writer takes `ids [passes, ranks, tokens, layers, top_k]`, -1 for no route; a layer of -1
throughout is a dense layer. `.pt` files are written without torch, by a pickler that knows the
names that `torch.save` uses.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

SGLANG_TOP_K = 8  # the width of SGLang's per-token buffer, whatever the model's top-k


def counts_of(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """`[passes, ranks, layers, E] i64` of `ids [passes, ranks, tokens, layers, top_k]`."""
    one_hot = (ids[..., None] == np.arange(num_experts)).sum(axis=(2, 4))
    return one_hot.astype(np.int64)


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: _Global
    key: str
    size: int


_KINDS = {"int32": "IntStorage", "int64": "LongStorage", "float32": "FloatStorage"}


class _TorchPickler(pickle._Pickler):
    """Pickles arrays as `torch.save` does tensors of a GPU; their bytes go to `storages`."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages: list[bytes] = []

    def persistent_id(self, obj):
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cuda:0", obj.size)
        return None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, _Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            return
        if isinstance(obj, np.ndarray):
            self._save_tensor(obj)
            return
        super().save(obj, save_persistent_id)

    def _save_tensor(self, array):
        array = np.ascontiguousarray(array)
        kind = _Global("torch", _KINDS[str(array.dtype)])
        storage = _Storage(kind, str(len(self.storages)), array.size)
        self.storages.append(array.tobytes())
        strides = tuple(step // array.itemsize for step in array.strides)
        arguments = (storage, 0, array.shape, strides, False, OrderedDict())
        self.save(_Global("torch._utils", "_rebuild_tensor_v2"))
        self.save(arguments)
        self.write(pickle.REDUCE)


def save_pt(content, path: Path) -> Path:
    """`torch.save(content, path)` with NumPy arrays for tensors."""
    program = io.BytesIO()
    pickler = _TorchPickler(program)
    pickler.dump(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", program.getvalue())
        archive.writestr(f"{path.stem}/byteorder", b"little")
        for key, data in enumerate(pickler.storages):
            archive.writestr(f"{path.stem}/data/{key}", data)
        archive.writestr(f"{path.stem}/version", b"3\n")
    return path


def physical_map(num_layers: int, num_experts: int, redundant: int) -> np.ndarray:
    """`[layers, E + redundant] i64`: physical experts' logical ones, a different map per layer."""
    rows = np.arange(num_experts + redundant) % num_experts
    return np.stack([np.roll(rows, layer) for layer in range(num_layers)])


def to_physical(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Physical ids of `ids [..., layers, top_k]`: the first replica of each expert."""
    first = np.stack([[(row == e).argmax() for e in range(row.max() + 1)] for row in table])
    layer = np.arange(len(table))[:, None]
    return np.where(ids < 0, -1, first[layer, np.maximum(ids, 0)])


def _global_physical_count(physical: np.ndarray, num_physical: int) -> np.ndarray:
    """`[layers, physical] i32` of `[tokens, layers, top_k]`."""
    return (physical[..., None] == np.arange(num_physical)).sum(axis=(0, 2)).astype(np.int32)


def _sglang(folder, ids, num_experts, redundant, record):
    """One `.pt` a rank; `record(pass, rank, physical ids)` gives what is particular to a mode."""
    table = physical_map(ids.shape[3], num_experts, redundant)
    for rank in range(ids.shape[1]):
        records = []
        for forward in range(len(ids)):
            physical = to_physical(ids[forward, rank], table)
            head = {"forward_pass_id": 17 + forward, "rank": rank, "gatherer_key": "primary"}
            records.append(head | record(forward, rank, physical))
        content = {"records": records, "last_physical_to_logical_map": table}
        save_pt(content, folder / f"expert_distribution_recorder_1764567890.25_{rank}.pt")
    return folder


def sglang_per_token(folder: Path, ids: np.ndarray, num_experts: int, redundant: int = 2) -> Path:
    """Mode per_token: ids of each layer in a buffer eight wide, beside what the batch was."""

    def record(forward, rank, physical):
        tokens, layers, top_k = physical.shape
        buffer = np.full((layers, tokens, SGLANG_TOP_K), -1, np.int32)
        buffer[:, :, :top_k] = physical.transpose(1, 0, 2)
        return {
            "input_ids": list(range(tokens)),
            "positions": list(range(tokens)),
            "extend_seq_lens": [tokens] if forward == 0 else None,
            "forward_mode": 1 if forward == 0 else 2,
            "topk_ids_of_layer": buffer,
            "misc_objects": [],
            "global_physical_count": _global_physical_count(physical, num_experts + redundant),
        }

    return _sglang(folder, ids, num_experts, redundant, record)


def sglang_per_pass(folder: Path, ids: np.ndarray, num_experts: int, redundant: int = 2) -> Path:
    """Mode per_pass: what each rank's router chose."""

    def record(forward, rank, physical):
        count = _global_physical_count(physical, num_experts + redundant)
        return {"global_physical_count": count}

    return _sglang(folder, ids, num_experts, redundant, record)


def sglang_low_latency(folder: Path, ids: np.ndarray, num_experts: int) -> Path:
    """Mode per_pass with DeepEP's low-latency dispatch: what each rank's own experts received."""
    num_ranks = ids.shape[1]
    table = physical_map(ids.shape[3], num_experts, 0)

    def record(forward, rank, physical):
        everyone = to_physical(ids[forward].reshape(-1, *ids.shape[3:]), table)
        count = _global_physical_count(everyone, num_experts)
        count[:, np.arange(num_experts) // (num_experts // num_ranks) != rank] = 0
        return {"global_physical_count": count}

    return _sglang(folder, ids, num_experts, 0, record)


def sglang_stat(folder: Path, ids: np.ndarray, num_experts: int, buffer: int = 5) -> Path:
    """Mode stat: logical counts of all ranks in a ring buffer that is not full; rank 0 writes."""
    count = np.zeros((buffer, ids.shape[3], num_experts), np.int32)
    count[: len(ids)] = counts_of(ids, num_experts).sum(axis=1)
    content = {"rank": 0, "logical_count": count, "average_utilization_rate_over_window": None}
    save_pt(content, folder / "expert_distribution_recorder_1764567890.25.pt")
    return folder


def sglang_jax(folder: Path, ids: np.ndarray, num_experts: int) -> Path:
    """sglang-jax: one dict per dump, by `np.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    count = counts_of(ids, num_experts).sum(axis=(0, 1))
    stamp = "20261201_0930"
    np.save(folder / f"dist_{stamp}.npy", {"logical_count": count, "timestamp": stamp})
    return folder


def json_counts(folder: Path, ids: np.ndarray, num_experts: int) -> Path:
    """What SGLang's `--init-expert-location` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    count = counts_of(ids, num_experts).sum(axis=1)
    (folder / "counts.json").write_text(json.dumps({"logical_count": count.tolist()}))
    return folder


def load_history(folder: Path, ids: np.ndarray, num_experts: int) -> Path:
    """vLLM's expert loads, step by step, on one line with the sizes of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    count = counts_of(ids, num_experts).sum(axis=1)
    steps = [{"step": i, "logical_expert_load": c.tolist()} for i, c in enumerate(count)]
    content = {"num_experts": num_experts, "num_layers": ids.shape[3], "load_history": steps}
    (folder / "expert-load.json").write_text(json.dumps(content))
    return folder


def vllm_routed_experts(folder: Path, ids: np.ndarray) -> Path:
    """vLLM's `routed_experts` of one request: the buffer has every layer, dense ones all zero."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = (ids < 0).all(axis=(0, 1, 2, 4))
    array = ids.reshape(-1, *ids.shape[3:]).astype(np.int32)
    array[:, dense] = 0
    np.save(folder / "routed_experts.npy", array)
    return folder


def tensorrt_llm(folder: Path, ids: np.ndarray, num_experts: int, extra: bool = True) -> Path:
    """TensorRT-LLM's statistics, with the files that its versions write beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"num_experts": num_experts, "num_experts_per_token": ids.shape[4]}
    if extra:
        meta |= {"ep_size": ids.shape[1], "experts_per_rank": num_experts // ids.shape[1]}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    routed = np.flatnonzero((ids >= 0).any(axis=(0, 1, 2, 4)))
    for rank in range(ids.shape[1]):
        chosen = {
            f"{50 + forward}_{layer}": np.ascontiguousarray(ids[forward, rank, :, layer])
            for forward in range(len(ids))
            for layer in routed
        }
        counts = {
            key: np.bincount(value[value >= 0], minlength=num_experts)
            for key, value in chosen.items()
        }
        save_file(counts, folder / f"rank{rank}.safetensors")
        if extra:
            save_file(chosen, folder / f"rank{rank}_raw.safetensors")
            save_file(chosen, folder / f"token_selected_experts_rank{rank}.safetensors")
            tokens = dict.fromkeys(chosen, ids.shape[2])
            (folder / f"rank{rank}_numtokens.json").write_text(json.dumps(tokens))
    return folder


def megatron(folder: Path, ids: np.ndarray, mtp: np.ndarray | None = None, extra=True) -> Path:
    """Megatron's router traces: a step per pass; `mtp` is a further `[..., 1, top_k]` MTP layer.

    A rank without tokens writes an empty list; a rank of no MoE layer an empty file; tensors that
    were captured too stand in sidecar files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    routed = np.flatnonzero((ids >= 0).any(axis=(0, 1, 2, 4)))
    for rank in range(ids.shape[1]):
        lines = []
        for step in range(len(ids)):
            layers = [("decoder", int(layer), ids[step, rank, :, layer]) for layer in routed]
            if mtp is not None:
                layers.append(("mtp", 0, mtp[step, rank, :, 0]))
            lines += [_line(step, rank, *layer) for layer in layers]
        (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
        if extra:
            (folder / f"logits_rank{rank}.bin").write_bytes(b"\x80\x3f" * 32)
            (folder / f"hidden_states_rank{rank}.bin").write_bytes(b"")
            save_pt({"weight": np.zeros(4, np.float32)}, folder / f"router_state_rank{rank}.pt")
    if extra:
        (folder / f"router_trace_rank{ids.shape[1]}.jsonl").write_bytes(b"")
    return folder


def _line(step, rank, block, layer, ids) -> str:
    ids = ids[(ids >= 0).any(axis=1)]
    record = {
        "step": step,
        "stage": "pre_dispatch",
        "block": block,
        "layer": layer,
        "rank": rank,
        "num_tokens": len(ids),
        "topk": ids.shape[1],
    }
    if block == "mtp":
        record["mtp_idx"] = 0
    record |= {"logit_offset": 0, "logit_bytes": 64, "logit_shape": [len(ids), 4]}
    return json.dumps(record | {"top_indices": ids.tolist()})
