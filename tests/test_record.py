"""What a record says of tensors and steps, and that recording changes no bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from project.data.loading import ResumableLoader, TrainBatchSampler
from project.record.attached import bits, digest, sketch
from project.record.format import distance, read_record, read_sketch
from project.record.recorder import Recorder, check_record_folder
from project.runtime.errors import UserError


def test_equal_hashes_mean_equal_type_shape_and_bytes() -> None:
    x = torch.arange(6.0)
    assert digest(x) == digest(x.clone())
    others = [x.double(), x.reshape(2, 3), x.flip(0), x.nextafter(torch.tensor(9.0)), x.bfloat16()]
    others += [torch.tensor([-0.0, *range(1, 6)])]  # equal to 0.0 as a number
    assert len({digest(other)["hash"] for other in [x, *others]}) == 7
    assert digest(x.reshape(2, 3).t())["hash"] != digest(x.reshape(3, 2))["hash"]
    for odd in (torch.tensor(3), torch.zeros(0), torch.tensor([True, False]), torch.zeros(2, 0, 3)):
        assert digest(odd)["shape"] == list(odd.shape)


def test_bits_tell_zeros_apart_and_nan_from_no_number() -> None:
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        one = torch.tensor([0.0, float("nan"), 1.0]).to(kind)
        assert (bits(one) == bits(torch.tensor([-0.0, float("nan"), 1.0]).to(kind))).tolist() == [False, True, True]
    assert bits(torch.arange(6.0).reshape(2, 3).T).shape == (3, 2)


def test_a_sketch_is_linear_and_estimates_the_size_of_a_difference() -> None:
    generator = np.random.default_rng(1)
    for size in (1, 10, 1024, 5000, 300_000):
        x, y = torch.from_numpy(generator.standard_normal((2, size)))
        np.testing.assert_allclose(sketch(x)[0] - sketch(y)[0], sketch(x - y)[0], atol=1e-8)
        assert sketch(x)[1] == pytest.approx(x.abs().sum().item())
        assert distance(digest(x), digest(y)) == pytest.approx((x - y).norm().item(), rel=0.6)
    for position in (0, 4321, 32 * 1024, 69_999):  # in the first block, and in the last, incomplete one
        one = torch.zeros(70_000)
        one[position] = -3.0
        assert set(sketch(one)[0].abs().tolist()) == {3.0}  # a single element is seen at its size by each projection
    assert np.isnan(read_sketch(digest(torch.tensor([1.0, float("nan")])))).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def fit(folder: Path | None) -> tuple[Net, list[dict[str, Tensor]]]:
    """Two epochs of two steps, each of two batches of two samples, with clipping; and the gradients before it."""
    torch.manual_seed(0)
    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = [(torch.randn(3), i % 2, i) for i in range(8)]
    dataset: Any = type("Samples", (), {"__len__": lambda _: 8, "__getitem__": lambda _, key: samples[key[1]]})()
    loader = ResumableLoader(dataset, batch_sampler=TrainBatchSampler(SequentialSampler(dataset), 2, False))
    if folder is not None:
        recorder = Recorder(folder, trainer="test", rank=0, world_size=1)
        recorder.attach(model, criterion=criterion, optimizer=optimizer, loader=loader, step=10, settings={"lr": 0.1})
    gradients = []
    for _ in range(2):
        for number, (x, target, _) in enumerate(loader):
            if number % 2 == 0:
                optimizer.zero_grad()
            criterion(model(x), target).backward()
            if number % 2 == 1:
                gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
    if folder is not None:
        model.eval()
        model(torch.zeros(1, 3))
        recorder.validation({"val/top1": 0.1 + 0.2}, epoch=1, step=14)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.train()  # a forgotten eval()
        for _ in range(2):
            criterion(model(torch.ones(2, 3)), torch.tensor([0, 1]))
        model.load_state_dict(state)
        recorder.validation({"val/top1": 0.5}, epoch=1, step=14)
        recorder.close()
    return model, gradients


def test_recording_sees_each_step_and_changes_nothing(tmp_path: Path) -> None:
    plain, _ = fit(None)
    recorded, gradients = fit(tmp_path)
    torch.testing.assert_close(recorded.state_dict(), plain.state_dict(), rtol=0, atol=0)
    [start, *steps, validation, untidy, end] = read_record(tmp_path)[0]
    assert (start["event"], start["trainer"], start["settings"]) == ("start", "test", {"lr": 0.1})
    assert [step["step"] for step in steps] == [10, 11, 12, 13]
    for step, gradient in zip(steps, gradients, strict=True):
        assert step["reduced"] == {name: digest(value) for name, value in gradient.items()}  # before clipping
        assert step["local"] == step["reduced"]  # of one rank
        assert step["lr"] == [0.1]
        assert len(step["batches"]) == 2
        assert {"index", "images", "target", "logits", "loss"} == step["batches"][0].keys()
    assert [batch["index"] for batch in steps[0]["batches"]] == [[0, 1], [2, 3]]
    assert steps[-1]["weights"] == {name: digest(value) for name, value in recorded.named_parameters()}
    assert steps[-1]["buffers"] == {name: digest(value) for name, value in recorded.named_buffers()}
    assert "last.weight/momentum_buffer" in steps[-1]["optimizer"]
    assert validation["metrics"] == {"val/top1": 0.30000000000000004}
    assert [batch.keys() for batch in validation["batches"]] == [{"images", "logits"}]
    assert [batch["training"] for batch in untidy["batches"]] == [True, True]
    assert end == {"event": "end", "steps": 4}
    assert all(json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text(encoding="utf-8").splitlines())


def test_folders(tmp_path: Path) -> None:
    check_record_folder(None)
    check_record_folder(str(tmp_path / "new"))
    with pytest.raises(UserError, match=r"no rank-0\.jsonl"):
        read_record(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="already holds a record"):
        check_record_folder(str(tmp_path))
