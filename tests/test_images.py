"""Every kind of image file becomes correct RGB, and what cannot be read is named."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import ResNet50_Weights
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from project.data.decode import read_image
from project.data.pixels import read_pixels
from project.data.transforms import Normalize, RandomResizedCrop, TrainTransform, val_transform
from project.runtime.errors import BadImageError
from project.settings.config import DataConfig
from project.settings.seed import seeded

RGB = np.dstack([np.full((8, 8), value, dtype=np.uint8) for value in (200, 100, 50)])


def save(path: Path, image: Image.Image, **options: object) -> str:
    image.save(path, **options)
    return str(path)


def centre(path: str) -> list[int]:
    image = read_image(path)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert torch.equal(read_pixels(path), pil_to_tensor(image))
    return list(image.getpixel((4, 4)))


def test_kinds_of_images(tmp_path: Path) -> None:
    colour = Image.fromarray(RGB)
    assert centre(save(tmp_path / "rgb.png", colour)) == [200, 100, 50]
    assert centre(save(tmp_path / "palette.png", colour.quantize(4))) == pytest.approx([200, 100, 50], abs=2)
    assert centre(save(tmp_path / "alpha.png", colour.convert("RGBA"))) == [200, 100, 50]
    assert centre(save(tmp_path / "grey.png", Image.new("L", (8, 8), 77))) == [77, 77, 77]
    assert centre(save(tmp_path / "grey_alpha.png", Image.new("LA", (8, 8), (77, 128)))) == [77, 77, 77]
    assert centre(save(tmp_path / "bilevel.png", Image.new("1", (8, 8), 1))) == [255, 255, 255]
    png = tmp_path / "png.JPEG"  # ImageNet has one
    colour.save(png, format="PNG")
    assert centre(str(png)) == [200, 100, 50]
    assert centre(save(tmp_path / "cmyk.jpg", colour.convert("CMYK"), quality=100)) == pytest.approx([200, 100, 50], abs=6)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    grey = Image.fromarray(np.full((8, 8), 32105, dtype=np.uint16))  # 32105 / 257 = 124.9
    assert centre(save(tmp_path / "grey16.png", grey)) == pytest.approx([125] * 3, abs=1)


def test_transparent_palette_and_bad_exif_give_no_warning(tmp_path: Path) -> None:
    palette = Image.fromarray(RGB).quantize(4)
    save(tmp_path / "palette.png", palette, transparency=b"\x00\x80\xff\xff")
    exif = Image.Exif()
    exif[270] = "x" * 40
    data = exif.tobytes()
    Image.fromarray(RGB).save(tmp_path / "exif.jpg", exif=data[:-30], quality=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # what the module installs
        centre(str(tmp_path / "palette.png"))
        centre(str(tmp_path / "exif.jpg"))
    turned = Image.Exif()
    turned[274] = 6
    path = save(tmp_path / "turned.jpg", Image.fromarray(RGB[:4]), exif=turned)
    assert read_image(path).size == (8, 4)  # not turned, as in torchvision
    assert torch.equal(read_pixels(path), pil_to_tensor(read_image(path)))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    for name, content in {
        "cut.jpg": whole.read_bytes()[:800],
        "empty.jpg": b"",
        "text.jpg": b"no image at all",
        "cut.png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImageError, match=name):
            read_image(str(tmp_path / name))
        with pytest.raises(BadImageError, match=name):
            read_pixels(str(tmp_path / name))
    with pytest.raises(BadImageError, match=r"missing\.jpg"):
        read_image(str(tmp_path / "missing.jpg"))


def test_validation_pixels_are_those_of_torchvisions_preset(photographs: list[Path]) -> None:
    preset = ResNet50_Weights.IMAGENET1K_V1.transforms()
    for path in photographs[:10]:
        ours = Normalize()(val_transform(val_resize=256, val_size=224)(read_image(str(path)))[None])[0]
        torch.testing.assert_close(ours, preset(Image.open(path).convert("RGB")), rtol=0, atol=1e-6)


def test_training_pixels_are_those_of_torchvisions_transforms_on_pillows_image(photographs: list[Path]) -> None:
    """To the bit: how they are decoded and resized is faster, and nothing else."""
    ours = TrainTransform(DataConfig(), epochs=1)
    theirs = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
    for number, path in enumerate(photographs):
        with seeded(number):
            pixels = ours(read_pixels(str(path)), 0)
        with seeded(number):
            assert torch.equal(pixels, theirs(read_image(str(path))))


@pytest.mark.parametrize("scale", [(0.08, 1.0), (1.0, 1.0)])
def test_crops_are_drawn_as_torchvision_draws_them(scale: tuple[float, float]) -> None:
    """From the same random numbers, of which as many are used, also where no draw fits."""
    crop, central = RandomResizedCrop(32, scale=scale), 0
    for rows, columns in itertools.product([1, 2, 3, 5, 8, 30, 31, 100, 375, 500], repeat=2):
        with seeded(1000 * rows + columns):
            theirs = crop.make_params([torch.empty(3, rows, columns)])
            following = torch.rand(1)
        with seeded(1000 * rows + columns):
            assert crop.draw(rows, columns) == (theirs["top"], theirs["left"], theirs["height"], theirs["width"])
            assert torch.equal(torch.rand(1), following)
        central += (theirs["top"], theirs["left"]) == ((rows - theirs["height"]) // 2, (columns - theirs["width"]) // 2)
    assert central > 10
