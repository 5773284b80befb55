"""A LightningModule that Lightning's own launcher trains on one or several ranks, with a validation between."""

import argparse
import hashlib
import warnings

import lightning
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch["x"]), batch["y"]), sync_dist=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Named(TensorDataset):
    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(40, 6)
    data = Named(x, x.sum(dim=1, keepdim=True))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "devices": given.devices, "accumulate_grad_batches": 2, **quiet},
        **{"strategy": "ddp" if given.devices > 1 else "auto", "gradient_clip_val": 0.5, "num_sanity_val_steps": 1},
    )
    module = Regression()
    trainer.fit(module, DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=8))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    print(f"rank {trainer.global_rank}: {hashlib.sha256(weights).hexdigest()}", flush=True)
