"""Weights for other programs: `python -m project.export --ckpt_path CKPT --out resnet50.pt` (or .safetensors, .onnx)."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from project.model.checkpoint_file import write_atomic
from project.model.inference import Trained, load_trained
from project.runtime.command import Parser
from project.runtime.errors import UserError
from project.runtime.files import prepare_place, replacing
from project.runtime.plurals import count
from project.runtime.process import run_command


def export_onnx(trained: Trained, path: Path) -> None:
    """float32 [n, 3, h, w], normalised as torchvision does -> logits [n, classes], for any n, h and w."""
    try:
        import onnxscript  # noqa: F401  # torch.onnx needs it
    except ModuleNotFoundError as error:
        raise UserError("--out *.onnx needs an extra: python -m pip install -e '.[onnx]'") from error
    example = torch.zeros(2, 3, trained.val_size, trained.val_size)
    dims = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    torch.onnx.export(
        trained.network,
        (example,),
        path,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=(dims,),
        external_data=False,
        verbose=False,
    )


def main() -> int:
    parser = Parser(prog="python -m project.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ckpt_path", help="a checkpoint of a run")
    parser.add_argument("--weights", help="or a state dict of torchvision or timm")
    parser.add_argument("--ema", action="store_true", help="the moving average of the checkpoint's run")
    parser.add_argument("--out", required=True, type=Path, help="file to write: .pt, .safetensors or .onnx")
    options = parser.parse_args()
    out: Path = options.out
    if out.suffix not in (".pt", ".pth", ".safetensors", ".onnx"):
        raise UserError(f"--out {out}: the name must end in .pt, .safetensors or .onnx.")
    prepare_place(out, flag="--out")
    trained = load_trained(ckpt_path=options.ckpt_path, weights=options.weights, ema=options.ema)
    if out.suffix in (".pt", ".pth"):
        write_atomic(trained.network.state_dict(), out)
    elif out.suffix == ".safetensors":
        with replacing(out) as partial:
            save_file(trained.network.state_dict(), partial)
    else:
        with replacing(out) as partial:
            export_onnx(trained, partial)
    classes = count(len(trained.classes), "class")
    print(
        f"{out}: {trained.arch} with {classes}, {out.stat().st_size / 1e6:.1f} MB; made for images of",
        end=" ",
    )
    print(f"{trained.val_size} x {trained.val_size} (short side {trained.val_resize})")
    return 0


if __name__ == "__main__":
    run_command(main)
