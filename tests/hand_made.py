"""Small records made by hand: two ranks, two epochs of three steps, everything as a right training would leave it."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project.parity.recorded_run import Event
from project.record.attached import digest
from project.record.format import tensor_file

# 9 samples over 2 ranks are 5 each, one of them padding: batches of 2, 2 and 1. 5 validation images are 3 each: 2 batches.
SAMPLES, VAL_SAMPLES, BATCH = 9, 5, 2


def settings(world_size: int) -> dict[str, Any]:
    data = {"root": "none", "global_batch_size": BATCH * world_size, "shuffle": True, "drop_last": False}
    return {
        "model": {"arch": "resnet18"},
        "data": data,
        "seed": 1,
        "precision": "32-true",
        "accumulate": 1,
        "samples": SAMPLES,
        "val_samples": VAL_SAMPLES,
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "backend": "gloo" if world_size > 1 else None,
    }


def ring_mean(local: list[Tensor], first: int = 0) -> Tensor:
    """As gloo adds the chunk that ends on some rank."""
    shares = [gradient * (1.0 / len(local)) for gradient in local]
    total = shares[first]
    for back in range(1, len(local)):
        total = total + shares[(first - back) % len(local)]
    return total


def make_ranks(*, world_size: int = 2, epochs: int = 2, folder: Path | None = None) -> dict[int, list[Event]]:
    """The events of each rank; with a folder also its files, and the gradients of step 0."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    environment = {"versions": {"torch": "2"}, "threads": 1, "device": "cpu"}
    ranks: dict[int, list[Event]] = {}
    for rank in range(world_size):
        start = {"event": "start", "trainer": "test", "rank": rank, "world_size": world_size}
        ranks[rank] = [{**start, "environment": environment, "settings": settings(world_size)}]
    share = math.ceil(SAMPLES / world_size)
    step = 0
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        order += order[: share * world_size - SAMPLES]
        for begin in range(0, share, BATCH):
            local = [{"conv": random(3, 4), "fc": random(5)} for _ in range(world_size)]
            reduced = {name: ring_mean([gradients[name] for gradients in local]) for name in local[0]}
            weights = {name: digest(random(*value.shape)) for name, value in reduced.items()}
            moments = {f"{name}/momentum_buffer": digest(random(*value.shape), sketched=False) for name, value in reduced.items()}
            for rank, events in ranks.items():
                batch = {
                    "index": order[rank::world_size][begin : begin + BATCH],
                    "images": digest(random(BATCH, 3)),
                    "target": digest(torch.tensor([0, 1])),
                    "logits": digest(random(BATCH, 2)),
                    "loss": 2.0 - 0.1 * step + 0.01 * rank,
                }
                events.append(
                    {
                        "event": "step",
                        "step": step,
                        "epoch": epoch,
                        "lr": [0.1],
                        "batches": [batch],
                        "local": {name: digest(value) for name, value in local[rank].items()},
                        "reduced": {name: digest(value) for name, value in reduced.items()},
                        "weights": weights,
                        "optimizer": moments,
                        "buffers": {"mean": digest(random(4))},
                    }
                )
                if folder is not None and step == 0:
                    kept = {"local": local[rank], **({"reduced": reduced} if rank == 0 else {})}
                    folder.mkdir(parents=True, exist_ok=True)
                    torch.save(kept, tensor_file(folder, step=0, rank=rank))
            step += 1
        metrics = {"val/top1": 0.6, "val/loss": 1.5, "val/images": float(VAL_SAMPLES)}
        count = math.ceil(math.ceil(VAL_SAMPLES / world_size) / BATCH)
        seen = [[{"images": digest(random(2, 3)), "logits": digest(random(2, 2))} for _ in range(count)] for _ in ranks]
        for rank, events in ranks.items():
            events.append({"event": "validation", "epoch": epoch, "step": step, "metrics": metrics, "batches": seen[rank]})
        record = {"epoch": epoch, "step": step, "history/0/train/loss": 1.9}
        state = {name: digest(random(5), sketched=False) for name in ("conv", "fc", "mean")}
        checkpoint = {"event": "checkpoint", "name": "last.ckpt", "keys": ["lockstep", "state_dict"]}
        ranks[0].append({**checkpoint, "state_dict": state, "record": record})
    for events in ranks.values():
        events.append({"event": "end", "steps": step})
    # Through JSON, as a record is read; and so that a change of one event changes no other
    ranks = json.loads(json.dumps(ranks), object_hook=lambda found: {int(k) if k.isdigit() else k: v for k, v in found.items()})
    if folder is not None:
        write_ranks(ranks, folder)
    return ranks


def write_ranks(ranks: dict[int, list[Event]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, events in ranks.items():
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def steps(events: list[Event], kind: str = "step") -> list[Event]:
    return [event for event in events if event["event"] == kind]
