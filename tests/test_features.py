"""Tests of features.py: torchvision's crops and features (golden files), broken files, the cache,
weights, devices."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import data
from lab import drawings
from lab import features
from lab import photos
from conftest import golden_parameter

HERE = Path(__file__).parent
GOLDEN = np.load(HERE / "data/resnet18.npz")
IMAGES = [HERE / "data/images" / name for name in GOLDEN["files"]]
TURNED = HERE / "data/images/exif_rotated.jpg"


def mean_colour(batch):
    return batch.mean((2, 3))


def make_dataset(folder, count=6):
    """`count` small images: half for train, the others for val, the last also for test."""
    (folder / "images/red_shoe").mkdir(parents=True)
    names = [f"red_shoe/{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        colour = 40 * number, 100, 255 - 40 * number
        Image.new("RGB", (40, 30), colour).save(folder / "images" / name)
    images = {"train": names[:count // 2], "val": names[count // 2:], "test": names[-1:]}
    targets = {phase: np.arange(len(images[phase])) for phase in images}
    pairs = {phase: np.zeros((1, 2), int) for phase in images}
    return data.Dataset("mine", folder, ["red"], ["shoe"], pairs, images, targets, None, [])


@pytest.fixture
def opened(monkeypatch):
    """The names of the photos opened so far."""
    names = []
    open_photo = photos.open_photo

    def noted(path, upright):
        names.append(Path(path).name)
        return open_photo(path, upright)

    monkeypatch.setattr(features, "open_photo", noted)
    return names


@pytest.fixture
def cheap(tmp_path, monkeypatch):
    """A weights file of one number, by which the mean colour is multiplied in place of ResNet-18;
    torch hub's, which is not there, has the number 1."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    path = tmp_path / "cheap.pth"
    path.write_text("2")

    def load_backbone(weights=None):
        factor = int(Path(weights).read_text()) if weights else 1
        return lambda batch: factor * mean_colour(batch)

    monkeypatch.setattr(features, "load_backbone", load_backbone)
    return path


def colours(dataset, phase, factor=2):
    means = []
    for name in dataset.images[phase]:
        crop = features.preprocess(Image.open(dataset.path(name)))
        means.append(factor * mean_colour(crop[None])[0])
    return np.stack(means)


def load(dataset, weights, **options):
    return features.load_features(dataset, weights=weights, device="cpu", **options)


# ---- images and ResNet-18 ----


@pytest.mark.parametrize("number", range(len(IMAGES)), ids=[path.name for path in IMAGES])
def test_crops_equal_torchvisions(number):
    made = features.preprocess(Image.open(IMAGES[number]))
    scaled = GOLDEN["crops"][number].astype(np.float32).transpose(2, 0, 1) / 255
    mean = np.float32([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    std = np.float32([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    assert made.dtype == torch.float32
    np.testing.assert_array_equal(made, (scaled - mean) / std)


def test_features_equal_torchvisions(weights):
    """Parameters are drawn by their names, so that these are torchvision's, too."""
    backbone = features.load_backbone(weights)
    assert not backbone.training and not any(some.requires_grad for some in backbone.parameters())
    made = features.extract(IMAGES, backbone=backbone, device="cpu", batch_size=4, upright=False)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, GOLDEN["features"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (257, 255)])
def test_odd_sizes(size):
    for mode in ("1", "LA", "I;16"):
        assert features.preprocess(Image.new(mode, size)).shape == (3, 224, 224)


def test_any_backbone_and_preprocessing_in_any_batch_size():
    def transform(image):  # as torchvision's, timm's and open_clip's: PIL image -> (3, 8, 6)
        values = np.array(image.resize((6, 8)), np.float32)
        return torch.from_numpy(values).permute(2, 0, 1) / 255

    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten()).train()
    opened = [photos.open_photo(path) for path in IMAGES]
    own = torch.stack([transform(image) for image in opened]).flatten(1)
    means = torch.stack([features.preprocess(image).mean((1, 2)) for image in opened])
    for batch_size in (1, 4, 64):
        options = dict(device="cpu", batch_size=batch_size)
        made = features.extract(map(str, IMAGES), backbone=mean_colour, **options)
        np.testing.assert_allclose(made, means, atol=1e-6)
        made = features.extract(IMAGES, backbone=module, preprocess=transform, **options)
        np.testing.assert_allclose(made, own, rtol=1e-4, atol=1e-5)
    assert module.training and not module[0].num_batches_tracked  # the module is as it was


# ---- bad input ----


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"returns \(3,\) for 9 images"):
        features.extract(IMAGES, backbone=lambda batch: batch.mean((0, 2, 3)), device="cpu")
    with pytest.raises(ValueError, match="no images"):
        features.extract([])
    for name in ("gpu", "cuda:x", "cuda:99"):
        with pytest.raises(ValueError, match=f"device must be .*{name}.: pass auto"):
            features.pick_device(name)


def test_unreadable_photos_are_all_named(tmp_path):
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(IMAGES[5].read_bytes()[:9000])
    paths = [IMAGES[0], cut, tmp_path / "missing.jpg", IMAGES[1]]
    options = dict(backbone=mean_colour, device="cpu", batch_size=2)
    with pytest.raises(ValueError, match=r"for 2 of 4 images: .*cut.jpg \(.*trunc.*missing.jpg"):
        features.extract(paths, **options)
    made = features.extract(paths, skip_broken=True, **options)
    assert np.isnan(made[1:3]).all() and np.isfinite(made[[0, 3]]).all()


def test_weights_that_are_none(tmp_path):
    for stored in ({"conv1.weight": torch.zeros(3)}, [1, 2]):
        torch.save(stored, tmp_path / "weights.pth")
        with pytest.raises(ValueError, match="weights.pth .*ResNet-18"):
            features.load_backbone(tmp_path / "weights.pth")


# ---- weights ----


def test_the_download_is_checked_and_kept(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    served = tmp_path / weights.name
    monkeypatch.setattr(features, "WEIGHTS_URL", served.as_uri())
    with pytest.raises(OSError, match="cannot download .*--weights FILE"):
        features.load_backbone()
    served.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(OSError, match="invalid hash.*put it at .*--weights FILE"):
        features.load_backbone()
    served.write_bytes(weights.read_bytes())
    features.load_backbone()
    served.unlink()  # now it comes from the cache
    expected = golden_parameter("layer4.1.bn2.bias", torch.zeros(512))
    assert torch.equal(features.load_backbone().layer4[1].bn2.bias, expected)


# ---- the cache ----


def test_cache_notices_what_changed(tmp_path, cheap, opened):
    dataset = make_dataset(tmp_path)
    for _ in range(2):
        _, made, words, recorded = load(dataset, cheap)
        assert len(opened) == 6  # the one in two phases once
        for phase in data.PHASES:
            np.testing.assert_allclose(made[phase], colours(dataset, phase), atol=1e-5)
    digits = hashlib.sha256(b"2").hexdigest()[:8]
    assert words == f"ResNet-18 (weights {digits}), 224 of 256 pixels, upright, frozen"
    assert recorded == str(cheap)

    for name in ("red_shoe/1.png", "red_shoe/new.png"):
        Image.new("RGB", (9, 9), "white").save(dataset.folder / "images" / name)
    train = ["red_shoe/new.png", "red_shoe/1.png", "red_shoe/2.png"]
    other = dataset._replace(images=dataset.images | {"train": train})
    np.testing.assert_allclose(load(other, cheap)[1]["train"], colours(other, "train"), atol=1e-5)
    assert sorted(opened[6:]) == ["1.png", "new.png"]
    dataset.path("red_shoe/1.png").unlink()
    with pytest.raises(FileNotFoundError, match="found neither .*1.png; put .*--features FILE"):
        load(other, cheap)


def test_weights_are_never_guessed(tmp_path, cheap, opened):
    dataset = make_dataset(tmp_path, 2)
    load(dataset, cheap, replace_cache=False)  # there is none yet
    cache = (tmp_path / "features.npz").read_bytes()
    load(dataset, None, replace_cache=False)
    assert (tmp_path / "features.npz").read_bytes() == cache
    opened.clear()
    _, made, words, recorded = load(dataset, None)
    np.testing.assert_allclose(made["train"], colours(dataset, "train", 1), atol=1e-5)
    assert "weights f37072fd" in words and recorded is None
    as_stored = load(dataset._replace(upright=False), None)
    assert "upright" not in as_stored[2] and len(opened) == 4  # two photos, twice
    # Without photos, features serve whoever names their weights.
    load(dataset, cheap)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="features.npz has features of .*give the --weights FILE"):
        load(dataset, None)
    served = load(dataset, cheap)[1]
    np.testing.assert_allclose(served["train"], 2 * made["train"], atol=1e-5)


def test_an_interrupt_keeps_what_is_extracted(tmp_path, cheap, opened, monkeypatch):
    """It comes in the third batch; a kill there would find what was written before."""
    dataset = make_dataset(tmp_path)
    batches = []

    def interrupted(batch):
        batches.append(batch)
        if len(batches) == 3:
            assert (tmp_path / "features.npz").exists()
            raise KeyboardInterrupt
        return 2 * mean_colour(batch)

    monkeypatch.setattr(features, "BATCH", 2)
    monkeypatch.setattr(features, "SAVE_SECONDS", -1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features, "load_backbone", lambda weights: interrupted)
        load(dataset, cheap)
    opened.clear()
    np.testing.assert_allclose(load(dataset, cheap)[1]["val"], colours(dataset, "val"), atol=1e-5)
    assert sorted(opened) == ["4.png", "5.png"]


def test_broken_images_can_be_skipped(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    for name in ("red_shoe/1.png", "red_shoe/4.png"):
        dataset.path(name).write_bytes(b"")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ValueError, match=r"2 of 6 images: red_shoe/1.png \(.*/4.png .*--skip"):
            load(dataset, cheap)
    dataset.path("red_shoe/4.png").unlink()
    left, made, _, _ = load(dataset, cheap, skip_broken=True)
    assert left.images["train"] == ["red_shoe/0.png", "red_shoe/2.png"]
    assert left.targets["train"].tolist() == [0, 2]
    assert "images left out: 2, red_shoe/1.png" in left.notes[-1]
    np.testing.assert_allclose(made["train"], colours(left, "train"), atol=1e-5)
    dataset.path("red_shoe/5.png").unlink()
    with pytest.raises(ValueError, match="no image of test"):
        load(dataset, cheap, skip_broken=True)


def test_read_only_data(tmp_path, cheap, opened, monkeypatch):
    dataset = make_dataset(tmp_path / "mine")
    monkeypatch.setattr(os, "access", lambda place, mode: place != dataset.folder)
    noted = load(dataset, cheap, fallback=tmp_path / "runs")[0]
    assert noted.notes[0].endswith("runs/mine-features.npz")
    again = load(dataset, cheap, fallback=tmp_path / "runs")[0]
    assert not again.notes and len(opened) == 6


# ---- other features ----


def test_features_of_a_file_and_of_a_folder(tmp_path):
    dataset = make_dataset(tmp_path, 4)
    files = [f"red_shoe/{number}.png" for number in (3, 1, 0, 2, 7)]
    values = np.float16([[3], [1], [0], [2], [np.inf]])
    own, clip = tmp_path / "features.npz", tmp_path / "clip.npz"
    np.savez(own, files=files, features=values)
    np.savez(clip, files=files, features=values, key="CLIP")
    for file, expected in ((None, f"features in {own}, frozen"), (clip, "CLIP, frozen")):
        _, made, words, recorded = features.load_features(dataset, file=file, weights="unused.pth")
        assert made["train"].tolist() == [[0], [1]] and made["val"].tolist() == [[2], [3]]
        assert made["train"].dtype == np.float32 and recorded is None and words == expected

    np.savez(clip, files=files[:3], features=[[np.nan], [1], [0]])
    said = r"clip.npz .*2 of 4 images: red_shoe/2.png \(not there\), .*3.png \(not finite\)"
    with pytest.raises(ValueError, match=said):
        features.load_features(dataset, file=clip)


def test_pixels_by_name(tmp_path, opened):
    """They have a cache of their own, and leave the features of the folder as they are."""
    dataset = make_dataset(tmp_path)
    Image.open(TURNED).save(dataset.path("red_shoe/0.png"), exif=Image.open(TURNED).getexif())
    (tmp_path / "features.npz").write_text("other")
    for _ in range(2):
        _, made, words, _ = features.load_features(dataset, file="pixels")
        assert words == f"{drawings.FEATURE}, upright, frozen" and len(opened) == 6
    like = features.features_like(dict(backbone=words), [dataset.path("red_shoe/0.png")])
    np.testing.assert_array_equal(like, made["train"][:1])
    turned = ImageOps.exif_transpose(Image.open(TURNED)).convert("RGB")
    np.testing.assert_array_equal(like[0], drawings.feature(turned))
    assert (tmp_path / "features.npz").read_text() == "other"


def test_features_like_those_of_a_run(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    _, made, words, recorded = load(dataset, cheap)
    settings = dict(backbone=words, weights=recorded)
    paths = list(map(dataset.path, dataset.images["train"]))
    np.testing.assert_array_equal(features.features_like(settings, paths, "cpu"), made["train"])
    moved = cheap.rename(tmp_path / "moved.pth")
    with pytest.raises(FileNotFoundError, match="no weights file .*cheap.pth"):
        features.features_like(settings, paths)
    like = features.features_like(settings, paths, "cpu", moved)
    np.testing.assert_array_equal(like, made["train"])
    moved.write_text("3")
    for other in (settings, dict(backbone="features in clip.npz, frozen")):
        with pytest.raises(ValueError, match=f"trained on {other['backbone'][:9]}.*--weights FILE"):
            features.features_like(other, paths, "cpu", moved)
