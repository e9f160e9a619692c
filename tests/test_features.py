"""Tests of features.py: torchvision's crops and features (golden files), broken files, the cache,
weights, devices."""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import common
import compcos
import data
import features

HERE = Path(__file__).parent
ROOT = HERE.parent
GOLDEN = np.load(HERE / "data/resnet18.npz")
IMAGES = [HERE / "data/images" / name for name in GOLDEN["files"]]
FASHION = HERE / "../../shared/data/fashion"


def golden_parameter(name, like):
    """A parameter by the golden recipe; BatchNorm's counter, which it does not name, as it is."""
    random, shape = np.random.default_rng(zlib.crc32(name.encode())), tuple(like.shape)
    if name.endswith("num_batches_tracked"):
        return like
    if name.endswith("running_var") or name.endswith("weight") and len(shape) == 1:
        value = random.uniform(0.5, 1.5, shape)
    elif name.endswith(("running_mean", "bias")):
        value = random.uniform(-0.1, 0.1, shape)
    else:
        value = random.standard_normal(shape) * (
            np.sqrt(2 / np.prod(shape[1:])) if len(shape) == 4 else 0.01
        )
    return torch.from_numpy(value.astype(np.float32))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file as published: torchvision's state dict, classifier included; its name ends in its
    hash."""
    like = features.resnet18().state_dict() | {
        "fc.weight": torch.zeros(1000, 512),
        "fc.bias": torch.zeros(1000),
    }
    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save({name: golden_parameter(name, value) for name, value in like.items()}, path)
    return path.rename(
        path.with_name(f"resnet18-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth")
    )


def mean_colour(batch):
    return batch.mean((2, 3))


def make_dataset(folder, count=6):
    """`count` small images, unless they are there: half for train, the others for val, the last
    also for test."""
    (folder / "images/red_shoe").mkdir(parents=True, exist_ok=True)
    names = [f"red_shoe/{number}.png" for number in range(count)]
    for number, path in enumerate(folder / "images" / name for name in names):
        if not path.exists():
            Image.new("RGB", (40, 30), (40 * number, 100, 255 - 40 * number)).save(path)
    images = {"train": names[: count // 2], "val": names[count // 2 :], "test": names[-1:]}
    return data.Dataset(
        "mine",
        folder,
        ["red"],
        ["shoe"],
        {phase: np.zeros((1, 2), int) for phase in images},
        images,
        {phase: np.arange(len(some)) for phase, some in images.items()},
        None,
        [],
    )


@pytest.fixture
def decoded(monkeypatch):
    """The names of the files decoded so far."""
    names, decode = [], features._decode
    monkeypatch.setattr(
        features,
        "_decode",
        lambda path, *rest: names.append(Path(path).name) or decode(path, *rest),
    )
    return names


@pytest.fixture
def cheap(tmp_path, monkeypatch):
    """A weights file of one number, by which the mean colour is multiplied in place of
    ResNet-18."""
    (tmp_path / "cheap.pth").write_text("2")
    monkeypatch.setattr(
        features, "load_backbone", lambda path: lambda x: int(path.read_text()) * mean_colour(x)
    )
    return tmp_path / "cheap.pth"


def colours(dataset, phase, factor=2):
    return np.stack(
        [
            factor * mean_colour(features.preprocess(Image.open(dataset.path(name)))[None])[0]
            for name in dataset.images[phase]
        ]
    )


# Images


@pytest.mark.parametrize("number", range(len(IMAGES)), ids=[path.name for path in IMAGES])
def test_crops_equal_torchvisions(number):
    made = features.preprocess(Image.open(IMAGES[number]))
    scaled = GOLDEN["crops"][number].astype(np.float32).transpose(2, 0, 1) / 255
    mean, std = (
        np.float32(values).reshape(3, 1, 1)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    assert made.dtype == torch.float32
    np.testing.assert_array_equal(made, (scaled - mean) / std)


def test_features_equal_torchvisions(weights):
    made = features.extract(
        IMAGES, backbone=features.load_backbone(weights), device="cpu", batch_size=4
    )
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, GOLDEN["features"], rtol=1e-3, atol=1e-5)


def test_sixteen_bit_greys_keep_their_upper_bits(tmp_path):
    values = (np.arange(256 * 256) % 65536).astype(np.uint16).reshape(256, 256)
    expected = np.repeat((values >> 8).astype(np.uint8)[16:240, 16:240, None], 3, 2)
    Image.fromarray(values).save(tmp_path / "grey.png")
    Image.fromarray(values).save(tmp_path / "grey.tif")
    big_endian = Image.frombytes("I;16B", (256, 256), values.astype(">u2").tobytes())
    for image in (
        Image.open(tmp_path / "grey.png"),
        Image.open(tmp_path / "grey.tif"),
        big_endian,
        Image.fromarray(values.astype(np.int32)),
    ):
        np.testing.assert_array_equal(features._crop(image), expected, err_msg=image.mode)


@pytest.mark.parametrize("mode", "1 L LA P PA RGB RGBA RGBX CMYK YCbCr HSV LAB I F I;16".split())
def test_every_mode_and_odd_sizes(mode):
    for size in ((1, 1), (3, 200), (257, 255)):
        assert features.preprocess(Image.new(mode, size)).shape == (3, 224, 224)


def test_pixels_are_area_means():
    colours = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    means = colours.reshape(16, 3, 16, 5, 3).mean((1, 3)).ravel()
    made = features.pixels(Image.fromarray(colours))
    assert made.shape == (768,) and made.dtype == np.float32
    # Pillow rounds to 8 bits along x, then along y
    np.testing.assert_allclose(made, (means - means.mean()) / means.std(), atol=1.1 / means.std())
    assert not features.pixels(Image.new("RGB", (20, 20), "red").convert("L")).any()


def test_orientation_counts_on_request():
    rotated = HERE / "data/images/exif_rotated.jpg"
    as_stored = features.extract([rotated], backbone="pixels", device="cpu")[0]
    upright = features.extract(
        [rotated], backbone="pixels", device="cpu", respect_orientation=True
    )[0]
    image = Image.open(rotated)
    np.testing.assert_array_equal(as_stored, features.pixels(image))
    np.testing.assert_array_equal(upright, features.pixels(ImageOps.exif_transpose(image)))
    assert not np.array_equal(as_stored, upright)


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_turned_as_pillow_turns_it(tmp_path, orientation):
    colours = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[features.ORIENTATION] = orientation
    Image.fromarray(colours).save(tmp_path / "a.png", exif=exif)
    made = features.extract(
        tmp_path / "a.png", backbone="pixels", device="cpu", respect_orientation=True
    )[0]
    turned = ImageOps.exif_transpose(Image.open(tmp_path / "a.png"))
    np.testing.assert_array_equal(made, features.pixels(turned))


@pytest.mark.parametrize("suffix", ["png", "webp", "jpg"])
@pytest.mark.filterwarnings("error")
def test_damaged_exif_data_leave_the_picture_readable(tmp_path, suffix):
    """As the check of data.py reads it; Pillow raises one error or another for the tags."""
    picture = Image.new("RGB", (40, 30), "red")
    for tags in (b"Exif\0\0MX\0*\0\0\0\x08", b"Exif\0\0MM\0*\0\0\0\x08\0"):
        path = tmp_path / f"photo.{suffix}"
        picture.save(path, exif=tags)
        assert data.no_photos({"photo": path}) == {}
        for upright in False, True:
            made = features.extract(path, backbone="pixels", device="cpu",
                                    respect_orientation=upright)[0]
            np.testing.assert_allclose(made, features.pixels(picture), atol=0.02)


# ResNet-18


def test_parameter_names_are_torchvisions():
    shapes = {name: tuple(value.shape) for name, value in features.resnet18().state_dict().items()}
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", *(f"bn1.{name}" for name in norm)}
    for block in (f"layer{layer}.{number}" for layer in (1, 2, 3, 4) for number in (0, 1)):
        for i in (1, 2):
            expected |= {f"{block}.conv{i}.weight", *(f"{block}.bn{i}.{name}" for name in norm)}
        if re.fullmatch(r"layer[234]\.0", block):
            expected |= {
                f"{block}.downsample.0.weight",
                *(f"{block}.downsample.1.{name}" for name in norm),
            }
    assert set(shapes) == expected
    assert (
        sum(value.numel() for value in features.resnet18().parameters()) == 11_689_512 - 513_000
    )  # without fc
    assert shapes["layer3.0.downsample.0.weight"] == (256, 128, 1, 1) and shapes[
        "conv1.weight"
    ] == (64, 3, 7, 7)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty torch hub cache, and a server of its folder `served`: (cache, served, address)."""
    served = tmp_path / "served"
    served.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *message):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=served)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    yield tmp_path / "hub/checkpoints", served, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_download_is_checked_and_kept(hub, weights, monkeypatch):
    cache, served, address = hub
    monkeypatch.setattr(features, "WEIGHTS_URL", f"{address}/{weights.name}")
    with pytest.raises(OSError, match=r"404.*--weights FILE"):
        features.load_backbone()
    (served / weights.name).write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(OSError, match=r"its hash begins.*--weights FILE"):
        features.load_backbone()
    assert not list(cache.glob("*"))
    (served / weights.name).write_bytes(weights.read_bytes())
    downloaded = features.load_backbone()
    (served / weights.name).unlink()  # now it comes from the cache
    for model in (downloaded, features.load_backbone()):
        assert torch.equal(
            model.layer4[1].bn2.bias, golden_parameter("layer4.1.bn2.bias", torch.zeros(512))
        )
        assert not model.training and not any(
            parameter.requires_grad for parameter in model.parameters()
        )


@pytest.mark.parametrize("answer", [
    b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nPK\x03\x04"], ids=["none", "begun"])
def test_a_server_of_weights_that_hangs_times_out(answer, hub, tmp_path, monkeypatch, capsys):
    """It takes the connection and says nothing, or not all; the script ends in one line."""
    cache, _, _ = hub
    dataset = make_dataset(tmp_path / "mine", 3)
    rows = [f"{dataset.images[phase][0]},red,shoe,{phase}" for phase in data.PHASES]
    (tmp_path / "mine/images.csv").write_text("\n".join(["image,state,object,split", *rows]))
    connections = []

    def hang(server):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        monkeypatch.setattr(features, "WEIGHTS_URL", f"http://127.0.0.1:{port}/net-01234567.pth")
        monkeypatch.setattr(features.download.fetch, "__kwdefaults__",
                            features.download.fetch.__kwdefaults__ | dict(timeout=0.2, wait=0))
        started = time.monotonic()
        with pytest.raises(SystemExit) as end:
            features.main([str(tmp_path / "mine"), "--device", "cpu"])
        server.shutdown(socket.SHUT_RDWR)
    assert time.monotonic() - started < 5 and connections
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch("error: .*timed out.*put it at .*--weights FILE; .*--feat.* FILE\n", error)
    assert not list(cache.glob("[!.]*"))  # but what has come is kept, hidden


def test_weights_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.pth"):
        features.load_backbone(tmp_path / "nowhere.pth")
    (tmp_path / "page.pth").write_text("<html>")
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name, said in (
        ("page", "no tensors"),
        ("other", "not the parameters"),
        ("list", "not the parameters"),
    ):
        with pytest.raises(ValueError, match=f"{name}.pth: {said}"):
            features.load_backbone(tmp_path / f"{name}.pth")


def test_pickles_that_run_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"files": ["a"], "features": Evil()}, tmp_path / "evil.t7")
    with pytest.raises(ValueError, match="evil.t7"):
        features.load_features(make_dataset(tmp_path / "set"), file=tmp_path / "evil.t7")
    assert not (tmp_path / "ran").exists()


def test_devices():
    assert features.pick_device("cpu") == torch.device("cpu")
    assert features.pick_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("gpu", "cuda:x", "cuda:99"):
        with pytest.raises(ValueError, match=f"{name}.*choose auto"):
            features.pick_device(name)


# Extraction


def test_any_callable_in_any_batch_size():
    expected = [mean_colour(features.preprocess(Image.open(path))[None])[0] for path in IMAGES]
    for batch_size in (1, 4, 64):
        made = features.extract(
            map(str, IMAGES), backbone=mean_colour, device="cpu", batch_size=batch_size
        )
        np.testing.assert_allclose(made, np.stack(expected), atol=1e-6)
    for path in IMAGES[0], str(IMAGES[0]):  # one alone
        np.testing.assert_allclose(
            features.extract(path, backbone=mean_colour, device="cpu"), expected[:1], atol=1e-6
        )
    module = torch.nn.Sequential(
        torch.nn.BatchNorm2d(3), torch.nn.AvgPool2d(224), torch.nn.Flatten()
    ).train()
    made = features.extract(IMAGES, backbone=module, device="cpu")
    np.testing.assert_allclose(
        made, np.stack(expected), rtol=1e-4, atol=1e-4
    )  # eval mode: BatchNorm does nothing
    assert module.training and not module[0].num_batches_tracked


def test_bad_arguments():
    for options, said in (
        ({"batch_size": 0}, "batch size 0"),
        ({"backbone": torch.sin}, "makes .*not .B, F"),
    ):
        with pytest.raises(ValueError, match=said):
            features.extract(IMAGES, **{"backbone": mean_colour, "device": "cpu"} | options)
    with pytest.raises(ValueError, match="no images"):
        features.extract([], backbone=mean_colour)


def test_broken_files_are_all_named(tmp_path, monkeypatch):
    content = {
        "text.jpg": b"hello",
        "empty.png": b"",
        "cut.jpg": IMAGES[5].read_bytes()[:9000],
        "cut.png": IMAGES[0].read_bytes()[:50000],
        "narrow.png": None,
        "big.png": None,
    }
    for name, some in content.items():
        if some is not None:
            (tmp_path / name).write_bytes(some)
    Image.new("L", (70000, 1)).save(
        tmp_path / "narrow.png"
    )  # few pixels, but 256 x 17.9 million once resized
    Image.new("1", (500, 500)).save(tmp_path / "big.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 120_000)  # as Pillow, twice that is read
    bad = [tmp_path / name for name in [*content, "missing.jpg"]]
    paths = [IMAGES[0], *bad[:4], IMAGES[1], *bad[4:]]
    with pytest.raises(ValueError, match="of 7 of 9 images") as caught:
        features.extract(paths, backbone=mean_colour, device="cpu", batch_size=3)
    for path, why in zip(
        bad, ("not an image", "not an image", "truncated", "truncated", "bomb", "bomb", "not there")
    ):
        assert re.search(rf"{path} \([^)]*{why}", str(caught.value)), path
    made = features.extract(
        paths, backbone=mean_colour, device="cpu", batch_size=3, skip_broken=True
    )
    with pytest.raises(
        ValueError, match="7 of 7 .*; mend them, or leave them out by --skip-broken"
    ):
        features.extract(bad, backbone=mean_colour, device="cpu", skip_broken=True)
    assert np.isnan(made[[1, 2, 3, 4, 6, 7, 8]]).all() and np.isfinite(made[[0, 5]]).all()


def test_long_lists_are_cut():
    with pytest.raises(
        ValueError, match=r"of 100 of 100 images: 0 \(not there\), .*, 19 \(not there\) and 80 more"
    ):
        features.extract(map(str, range(100)), backbone=mean_colour, device="cpu")


# The cache


def load(dataset, weights, **options):
    return features.load_features(dataset, weights=weights, device="cpu", batch_size=2, **options)


def test_cache_notices_what_changed(tmp_path, cheap, decoded):
    dataset = make_dataset(tmp_path)
    same, first, about = load(dataset, cheap)
    assert (
        same == dataset
        and set(first) == {"train", "val", "test"}
        and first["val"].dtype == np.float32
    )
    assert (
        about
        == f"ResNet-18 (weights {hashlib.sha256(b'2').hexdigest()[:8]}), 224 of 256 pixels, frozen"
    )
    for phase in first:
        np.testing.assert_allclose(first[phase], colours(dataset, phase), atol=1e-5)
    assert len(decoded) == 6  # the one in two phases once
    again = load(dataset, cheap)[1]
    assert len(decoded) == 6 and all(np.array_equal(again[phase], first[phase]) for phase in first)

    for name in ("red_shoe/1.png", "red_shoe/new.png"):
        Image.new("RGB", (9, 9), "white").save(dataset.path(name))
    train = ["red_shoe/new.png", "red_shoe/1.png", "red_shoe/2.png"]
    other = dataset._replace(images=dataset.images | {"train": train})
    np.testing.assert_allclose(load(other, cheap)[1]["train"], colours(other, "train"), atol=1e-5)
    assert sorted(decoded[6:]) == ["1.png", "new.png"]
    dataset.path("red_shoe/1.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 6 images: red_shoe/1.png \(not there\)"):
        load(other, cheap)


def test_cache_is_keyed_by_weights_and_preprocessing(tmp_path, cheap, decoded):
    dataset, other = make_dataset(tmp_path, 2), tmp_path / "other.pth"
    other.write_text("3")
    load(dataset, cheap)
    np.testing.assert_allclose(
        load(dataset, other)[1]["train"], colours(dataset, "train", 3), atol=1e-5
    )
    assert "upright" in load(dataset, other, respect_orientation=True)[2]
    assert len(decoded) == 6


def test_cache_serves_without_images(tmp_path, cheap):
    dataset = make_dataset(tmp_path, 2)
    first = load(dataset, cheap)[1]["train"]
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    _, again, about = load(dataset, None)
    np.testing.assert_array_equal(again["train"], first)
    assert "ResNet-18" in about
    (tmp_path / "features.npz").unlink()
    with pytest.raises(FileNotFoundError, match="none of 2 images.*--features FILE"):
        load(dataset, cheap)


def test_interrupted_extraction_resumes(tmp_path, cheap, decoded, monkeypatch):
    dataset, calls = make_dataset(tmp_path), []

    def interrupted(batch):
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 2 * mean_colour(batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features, "load_backbone", lambda weights: interrupted)
        load(dataset, cheap)
    decoded.clear()
    np.testing.assert_allclose(load(dataset, cheap)[1]["val"], colours(dataset, "val"), atol=1e-5)
    assert sorted(decoded) == [
        "2.png",
        "3.png",
        "4.png",
        "5.png",
    ]  # the second batch was still on its way


def test_signalled_script_keeps_its_work(tmp_path, cheap, decoded):
    """A cluster's way to stop a job, sent twice as some do, the second one into the save."""
    dataset = make_dataset(tmp_path)
    rows = ["image,state,object,split"]
    for number, phase in enumerate(["train", "train", "train", "val", "val", "test"]):
        rows.append(f"red_shoe/{number}.png,red,shoe,{phase}")
    (tmp_path / "images.csv").write_text("\n".join(rows))
    program = f"""if True:
        import os, signal, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
        import common, features, test_features
        calls = []
        def stopped(batch):
            calls.append(0)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return 2 * test_features.mean_colour(batch)
        write_whole = common.write_whole
        def again(path, contents):
            os.kill(os.getpid(), signal.SIGTERM)
            write_whole(path, contents)
        common.write_whole = again
        features.load_backbone = lambda weights: stopped
        features.main(sys.argv[1:])"""
    command = [sys.executable, "-c", program, tmp_path, "--weights", cheap, "--batch-size", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 143 and "Traceback" not in ended.stderr
    decoded.clear()
    np.testing.assert_allclose(load(dataset, cheap)[1]["val"], colours(dataset, "val"), atol=1e-5)
    assert sorted(decoded) == ["2.png", "3.png", "4.png", "5.png"]
    assert not list(tmp_path.rglob("*part*"))


def test_killed_extraction_resumes(tmp_path, cheap, decoded, monkeypatch):
    """Killed in the third batch: what was written until then is there, and nothing after it."""
    dataset = make_dataset(tmp_path)
    calls = []

    def network(batch):
        calls.append(0)
        if len(calls) == 3:
            patch.setattr(features, "_write_cache", lambda *_: None)
            raise SystemExit
        return 2 * mean_colour(batch)

    with monkeypatch.context() as patch:
        patch.setattr(features, "SAVE_EVERY", 0)
        patch.setattr(features, "load_backbone", lambda weights: network)
        with pytest.raises(SystemExit):
            load(dataset, cheap)
    decoded.clear()
    assert (tmp_path / "features.partial.npz").exists() and not (tmp_path / "features.npz").exists()
    np.testing.assert_allclose(load(dataset, cheap)[1]["val"], colours(dataset, "val"), atol=1e-5)
    assert sorted(decoded) == ["2.png", "3.png", "4.png", "5.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cheap.pth",
        "features.npz",
        "images",
    ]


def test_broken_images_can_be_skipped(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    for name in ("1", "5"):
        dataset.path(f"red_shoe/{name}.png").write_bytes(b"")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            ValueError,
            match=r"2 of 6 images: red_shoe/1.png \(not an image\), red_shoe/5.png .*--s",
        ):
            load(dataset, cheap)
        left, some, _ = load(dataset, cheap, skip_broken=True)
        assert left.images == {
            "train": ["red_shoe/0.png", "red_shoe/2.png"],
            "val": ["red_shoe/3.png", "red_shoe/4.png"],
            "test": [],
        }
        assert [left.targets[phase].tolist() for phase in ("train", "val", "test")] == [
            [0, 2],
            [0, 1],
            [],
        ]
        assert (
            some["test"].shape == (0, 3) and "2 images left out: red_shoe/1.png" in left.notes[-1]
        )
        np.testing.assert_allclose(some["train"], colours(left, "train"), atol=1e-5)
    assert dataset.images["test"] and not dataset.notes


# Features of others


@pytest.mark.parametrize("kind", ["tensor", "array", "strings", "scalars", "rows", "npz"])
def test_published_features_are_read(tmp_path, kind):
    dataset = make_dataset(tmp_path, 4)
    names = [
        f".\\red_shoe\\{number}.png" if number == 1 else f"red_shoe/{number}.png"
        for number in (3, 1, 0, 2, 7)
    ]
    values = np.array([[3, 3], [1, 1], [0, 0], [2, 2], [7, 7]], np.float32)
    if kind == "npz":
        np.savez(tmp_path / "features.npz", files=names, features=values.astype(np.float16))
    else:
        files = {"strings": np.array(names), "scalars": list(np.array(names))}.get(kind, names)
        stored = {"tensor": torch.from_numpy(values), "rows": list(values)}.get(kind, values)
        torch.save({"features": stored, "files": files}, tmp_path / "resnet18_featurers.t7")
    _, made, about = features.load_features(dataset)
    assert made["train"].tolist() == [[0, 0], [1, 1]] and made["val"].tolist() == [[2, 2], [3, 3]]
    assert made["train"].dtype == np.float32 and "feature" in about and "frozen" in about
    np.savez(
        tmp_path / "clip.npz", files=names, features=values + 1, key="CLIP"
    )  # a file given goes first
    _, made, about = features.load_features(dataset, file=tmp_path / "clip.npz")
    assert made["test"].tolist() == [[4, 4]] and about == "CLIP, frozen"


@pytest.mark.parametrize(
    "called, content, said",
    [
        ("files", np.zeros((1, 2)), r"of red_shoe/0.png\).*1 of 2 images: red_shoe/1.png"),
        ("files", np.zeros((3, 2)), r"2 files and features \(3, 2\) float64, expected \(N, F\)"),
        ("files", np.zeros(2), r"features \(2,\) float64, expected"),
        ("files", np.array([["x"], ["y"]]), r"features \(2, 1\) <U1, expected"),
        ("files", np.array([[None], [None]]), "Object arrays"),
        (
            ["red_shoe/0.png", "./red_shoe/0.png"],
            np.eye(2),
            "several rows that differ for red_shoe/0.png;",
        ),
        ("names", np.zeros((2, 2)), "holds names, features; expected `files`"),
        ("files", np.array([[0], [np.inf]]), "1 image are not finite: red_shoe/1.png"),
    ],
)
def test_wrong_features_are_explained(tmp_path, called, content, said):
    files = ["red_shoe/0.png", "red_shoe/1.png"][: len(content)]
    files, called = (files, called) if isinstance(called, str) else (called, "files")
    np.savez(tmp_path / "wrong.npz", **{called: files, "features": content})
    with pytest.raises(ValueError, match=f"wrong.npz.*{said}"):
        features.load_features(make_dataset(tmp_path, 2), file=str(tmp_path / "wrong.npz"))


def test_a_file_that_is_no_archive(tmp_path):
    (tmp_path / "page.npz").write_text("<html>")
    with pytest.raises(ValueError, match="page.npz: not a NumPy .npz"):
        features.load_features(make_dataset(tmp_path), file=tmp_path / "page.npz")
    with pytest.raises(FileNotFoundError, match="nowhere.npz"):
        features.load_features(make_dataset(tmp_path), file=tmp_path / "nowhere.npz")


@pytest.mark.skipif(not FASHION.exists(), reason="needs ../shared")
def test_fashion():
    dataset = data.load(FASHION)
    same, made, about = features.load_features(dataset)
    with np.load(FASHION / "features.npz") as file:
        row = file["files"].tolist().index(dataset.images["val"][7])
        np.testing.assert_array_equal(made["val"][7], file["features"][row].astype(np.float32))
    assert (
        same is dataset
        and sum(map(len, made.values())) == 19_877
        and "features.npz, frozen" in about
    )


# The script


def test_script(tmp_path, weights, capsys, decoded):
    dataset = make_dataset(tmp_path / "mine", 4)
    rows = [
        f"{name},red,shoe,{phase}"
        for phase in ("train", "val", "test")
        for name in dataset.images[phase][:1]
    ]
    (tmp_path / "mine/images.csv").write_text("\n".join(["image,state,object,split", *rows]))
    command = [
        "mine",
        "--data-root",
        str(tmp_path),
        "--weights",
        str(weights),
        "--device",
        "cpu",
    ]
    features.main(command)
    features.main(command)
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first == second
        and "train (1, 512), val (1, 512), test (1, 512); ResNet-18" in first
        and len(decoded) == 3
    )
    dataset.path(dataset.images["train"][0]).write_text("")
    with pytest.raises(SystemExit) as caught:
        features.main(command)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"error: no features of 1 of 3 images: red_shoe/0.png \(not an image\); .*\n", said
    )


def test_missing_weights_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights file .*none.pth"):
        features.load_backbone(tmp_path / "none.pth")


# What people bring


def test_own_preprocessing_and_module():
    def transform(image):  # as torchvision's, timm's and open_clip's: PIL image -> (3, 8, 6)
        values = np.array(image.resize((6, 8)), np.float32)
        return torch.from_numpy(values).permute(2, 0, 1) / 255

    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 6, 5))
    opened = [Image.open(path).convert("RGB") for path in IMAGES[:4]]
    expected = module(torch.stack([transform(image) for image in opened])).detach()
    made = features.extract(
        IMAGES[:4], backbone=module, preprocess=transform, device="cpu", batch_size=3
    )
    np.testing.assert_allclose(made, expected, atol=1e-6)
    upright = features.extract(
        [HERE / "data/images/exif_rotated.jpg"],
        backbone=module,
        preprocess=transform,
        device="cpu",
        respect_orientation=True,
    )
    turned = ImageOps.exif_transpose(Image.open(HERE / "data/images/exif_rotated.jpg"))
    np.testing.assert_allclose(upright, module(transform(turned)[None]).detach(), atol=1e-6)


@pytest.mark.parametrize(
    "transform, said",
    [
        (np.array, "preprocess makes a ndarray, expected a tensor"),
        (lambda image: torch.zeros(image.size), "tensors of several shapes, expected one"),
        (lambda image: torch.zeros(3), r"makes \(3,\) of 3 images, not \(B, F\)"),
    ],
)
def test_preprocessing_that_is_none(tmp_path, transform, said):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8 + number, 9)).save(path)
    with pytest.raises(ValueError, match=said):
        features.extract(
            paths, backbone=lambda batch: batch.sum(0), preprocess=transform, device="cpu"
        )


def test_large_photos_are_read_up_to_a_limit_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150_000)
    Image.new("RGB", (500, 400), "red").save(tmp_path / "large.png")  # 200,000 pixels
    Image.new("RGB", (700, 500), "red").save(tmp_path / "huge.png")
    options = {"backbone": mean_colour, "device": "cpu"}
    made = features.extract(tmp_path / "large.png", **options)
    with pytest.raises(ValueError, match="700 x 500 pixels, over the limit of 300,000 .*--max-pix"):
        features.extract(tmp_path / "huge.png", **options)
    lifted = features.extract(tmp_path / "huge.png", max_pixels=350_000, **options)
    np.testing.assert_allclose(lifted, made, atol=1e-5)
    with pytest.raises(ValueError, match="200 x 100 pixels|500 x 400 pixels"):
        features.extract(tmp_path / "large.png", max_pixels=199_999, **options)
    assert Image.MAX_IMAGE_PIXELS == 150_000


def test_float_images(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (300, 256), dtype=np.uint8)
    expected = features._crop(Image.fromarray(grey))
    for scale, name in ((255, "unit.tif"), (1, "bytes.tif")):
        Image.fromarray(grey.astype(np.float32) / scale).save(tmp_path / name)
        np.testing.assert_array_equal(features._crop(Image.open(tmp_path / name)), expected)
    Image.fromarray(np.full((9, 9), 4000, np.float32)).save(tmp_path / "depth.tif")
    Image.fromarray(np.full((9, 9), np.nan, np.float32)).save(tmp_path / "nan.tif")
    for name in ("depth", "nan"):
        with pytest.raises(ValueError, match=rf"{name}.tif \(floats from .* expected \[0, 1\]"):
            features.extract(tmp_path / f"{name}.tif", backbone="pixels", device="cpu")


def test_weights_as_training_loops_save_them(tmp_path):
    state = {
        name: golden_parameter(name, value)
        for name, value in features.resnet18().state_dict().items()
    }
    parallel = {f"module.{name}": value for name, value in state.items()}
    lightning = {f"backbone.{name}": value for name, value in state.items()}
    lightning |= {"head.weight": torch.ones(2)}
    kept = [
        parallel,
        lightning,
        {"state_dict": state},
        {"model": parallel, "epoch": 3},
        {"net": {f"module.{name}": value for name, value in lightning.items()}},
    ]
    kept[-1]["net"].pop("module.head.weight")
    for stored in kept:
        torch.save(stored, tmp_path / "kept.pth")
        model = features.load_backbone(tmp_path / "kept.pth")
        assert torch.equal(model.layer4[1].bn2.bias, state["layer4.1.bn2.bias"])
    torch.save(torch.ones(2, 3), tmp_path / "one.pth")
    with pytest.raises(ValueError, match=r"one.pth: .*one tensor \(2, 3\), expected a dict"):
        features.load_backbone(tmp_path / "one.pth")


def test_ignored_orientations_and_equal_files_are_noted(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    exif = Image.Exif()
    exif[features.ORIENTATION] = 6
    turned = dataset.path("red_shoe/0.png")
    Image.new("RGB", (40, 30), "blue").save(turned, exif=exif)
    dataset.path("red_shoe/4.png").write_bytes(turned.read_bytes())
    dataset.path("red_shoe/5.png").write_bytes(dataset.path("red_shoe/1.png").read_bytes())
    dataset.targets["val"][1] = 7  # 4.png; it is 0 as 0.png, in training
    dataset.targets["val"][2] = 1  # 5.png as 1.png
    for _ in range(2):  # the second time from the cache
        notes = load(dataset, cheap)[0].notes
        assert notes[0].startswith("2 images with an orientation that is ignored (red_shoe/0.png")
        assert "--respect-orientation" in notes[0]
        assert notes[1] == (
            "2 val images (66.7%) whose file is in train too by another name, "
            "1 with another composition: an accuracy ceiling of 66.7% of val for "
            "who answers as train shows"
        )
        assert notes[2].startswith("1 test image (100.0%) whose file is in train too by another")
        assert len(notes) == 3
    notes = load(dataset, cheap, respect_orientation=True)[0].notes
    assert len(notes) == 2 and not dataset.notes


@pytest.mark.parametrize("prefix", ["images/", "/elsewhere/data/images/"])
def test_prefixes_in_feature_files(tmp_path, prefix):
    dataset = make_dataset(tmp_path, 2)
    np.savez(
        tmp_path / "mine.npz",
        files=[f"{prefix}red_shoe/{number}.png" for number in (1, 0)],
        features=[[1.0], [2.0]],
    )
    made = features.load_features(dataset, file=tmp_path / "mine.npz")[1]
    assert made["train"].tolist() == [[2]] and made["val"].tolist() == [[1]]


def test_decomposed_names_in_feature_files(tmp_path):
    dataset = make_dataset(tmp_path, 2)
    dataset = dataset._replace(images=dataset.images | {"train": ["caf\u00e9.png"]})
    np.savez(
        tmp_path / "mine.npz", files=["cafe\u0301.png", "red_shoe/1.png"], features=[[3.0], [4.0]]
    )
    made = features.load_features(dataset, file=tmp_path / "mine.npz")[1]
    assert made["train"].tolist() == [[3]]


def test_tensors_of_every_kind(tmp_path):
    dataset = make_dataset(tmp_path, 2)
    files = ["red_shoe/0.png", "red_shoe/1.png"]
    values = torch.tensor([[1.0, 2], [0, 0]])
    for kind in (values.bfloat16(), values.clone().requires_grad_()):
        torch.save({"files": files, "features": kind}, tmp_path / "mine.t7")
        noted, made, _ = features.load_features(dataset, file=tmp_path / "mine.t7")
        assert made["train"].tolist() == [[1, 2]]
        assert noted.notes == [
            "1 image with features of zeros alone, which tell nothing: red_shoe/1.png"
        ]
    torch.save({"files": files, "features": values[:, :0]}, tmp_path / "mine.t7")
    with pytest.raises(ValueError, match="mine.t7: features of 0 numbers"):
        features.load_features(dataset, file=tmp_path / "mine.t7")
    torch.save({"files": files, "features": 1e300 * values.double()}, tmp_path / "mine.t7")
    with pytest.raises(ValueError, match="1 image are not finite: red_shoe/0.png"):
        features.load_features(dataset, file=tmp_path / "mine.t7")


# Where the cache lies


@pytest.fixture
def read_only(monkeypatch):
    """Folders added to this list cannot be written (permissions do not bind root)."""
    folders = []
    temporary = common.tempfile.TemporaryFile

    def refuse(dir):
        if Path(dir) in folders:
            raise PermissionError(13, "Read-only file system")
        return temporary(dir=dir)

    monkeypatch.setattr(common.tempfile, "TemporaryFile", refuse)
    return folders


def test_read_only_data(tmp_path, cheap, decoded, read_only):
    dataset = make_dataset(tmp_path / "mine")
    read_only.append(dataset.folder)
    with pytest.raises(OSError, match="mine: Read-only file system.*--cache DIR"):
        load(dataset, cheap)
    assert not decoded  # it is found out before
    noted, first, _ = load(dataset, cheap, fallback=tmp_path / "runs")
    assert noted.notes == [
        f"{dataset.folder} cannot be written: features are cached in "
        f"{tmp_path / 'runs/mine-features.npz'}"
    ]
    again, second, _ = load(dataset, cheap, fallback=tmp_path / "runs")
    assert not again.notes and len(decoded) == 6
    np.testing.assert_array_equal(first["val"], second["val"])
    same, _, _ = load(dataset, cheap, cache=tmp_path / "caches/here")
    assert not same.notes and len(decoded) == 12
    assert [path.name for path in (tmp_path / "caches/here").iterdir()] == ["mine-features.npz"]
    assert [path.name for path in dataset.folder.iterdir()] == ["images"]
    np.testing.assert_allclose(first["train"], colours(dataset, "train"), atol=1e-5)


@pytest.fixture
def nobody():
    """(a folder that nobody may write, one that may be written), looked at as another user."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    data.photo_suffixes()  # Pillow's plugins, which others may not be allowed to import
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        closed = Path(folder, "closed")
        opened = Path(folder, "opened")
        for place, mode in ((closed, 0o755), (opened, 0o777), (Path(folder), 0o755)):
            place.mkdir(exist_ok=True)
            place.chmod(mode)
        try:
            yield closed, opened
        finally:
            os.seteuid(0)


def test_data_of_another_user(nobody, decoded, monkeypatch):
    closed, opened = nobody
    weights = opened / "cheap.pth"
    weights.write_text("2")
    monkeypatch.setattr(features, "load_backbone", lambda path: mean_colour)
    dataset = make_dataset(closed)
    os.seteuid(65534)
    with pytest.raises(OSError, match="cannot write into .*closed: Permission denied"):
        load(dataset, weights)
    assert not decoded
    noted, _, _ = load(dataset, weights, fallback=opened / "runs")
    cache = opened / "runs/mine-features.npz"
    assert noted.notes == [f"{closed} cannot be written: features are cached in {cache}"]
    assert cache.exists() and [path.name for path in closed.iterdir()] == ["images"]
    os.seteuid(0)
    (closed / "images/red_shoe").chmod(0)
    os.seteuid(65534)
    with pytest.raises(PermissionError):
        data.photo_files(closed)  # and does not take it for empty
    assert "was not seen" in data.unnamed_photos(dataset)[0]


def test_the_page_runs_with_stand_ins_for_timm_and_open_clip(tmp_path, monkeypatch):
    page = (Path(features.__file__).parent / "README.md").read_text(encoding="utf-8")
    block = next(part for part in page.split("```") if "import open_clip" in part)
    for state in ("wet", "dry"):
        for object_ in ("dog", "cat", "hat"):
            (tmp_path / "photos" / state / object_).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (9, 8), (len(state), number, 9)).save(
                    tmp_path / "photos" / state / object_ / f"{number}.png"
                )
    data.make_split(tmp_path / "photos")

    class Transform:  # PIL image -> (3, 4, 4)
        def __call__(self, image):
            return torch.from_numpy(np.array(image.resize((4, 4)), np.float32)).permute(2, 0, 1)

    class Clip(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6))
            self.token_embedding = torch.nn.Embedding(99, 7)

        def encode_text(self, tokens):  # (N, 77) int64 -> (N, 7)
            return self.token_embedding(tokens).mean(1)

    def tokenize(texts):
        return torch.tensor([[len(text)] * 77 for text in texts])

    timm = types.ModuleType("timm")
    timm.create_model = lambda name, pretrained, num_classes: Clip().visual
    timm.data = types.SimpleNamespace(
        resolve_model_data_config=lambda model: {"input_size": (3, 4, 4), "crop_pct": 1.0},
        create_transform=lambda input_size, crop_pct: Transform(),
    )
    open_clip = types.ModuleType("open_clip")
    open_clip.create_model_and_transforms = lambda name, pretrained: (Clip(), None, Transform())
    open_clip.get_tokenizer = lambda name: tokenize
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "open_clip", open_clip)
    monkeypatch.chdir(tmp_path)
    exec(block.removeprefix("text"), {})

    command = "python compcos.py --dataset photos --features clip.npz --vectors clip_words.npz"
    assert command in page
    compcos.main([*command.split()[2:], "--epochs", "1", "--members", "1", "--device", "cpu"])
    settings = json.loads(Path("runs/photos-compcos-open/metrics.json").read_text())["settings"]
    assert settings["vectors"] == ["clip_words.npz"] and "clip.npz" in settings["backbone"]
    for name, width in (("dino", 6), ("clip", 6)):
        assert data.read_features(f"{name}.npz")["features"].shape == (24, width)


def test_a_cache_of_named_weights_serves_without_naming_them(tmp_path, cheap, decoded, monkeypatch):
    dataset = make_dataset(tmp_path)
    first, about = load(dataset, cheap)[1:]
    moved = tmp_path / "moved.pth"
    cheap.rename(moved)
    _, second, same = load(dataset, None)
    assert same == about and len(decoded) == 6
    np.testing.assert_array_equal(first["val"], second["val"])
    # Of an image more, the weights file is needed, and found where it was.
    moved.rename(cheap)
    Image.new("RGB", (9, 9), "white").save(dataset.path("red_shoe/0.png"))
    np.testing.assert_allclose(
        load(dataset, None)[1]["train"], colours(dataset, "train"), atol=1e-5
    )
    assert decoded[6:] == ["0.png"]


def test_a_damaged_cache_is_named(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    load(dataset, cheap)
    content = bytearray((tmp_path / "features.npz").read_bytes())
    with np.load(tmp_path / "features.npz") as stored:
        place = bytes(content).index(stored["features"].tobytes())
    content[place + 2] ^= 4
    (tmp_path / "features.npz").write_bytes(content)
    with pytest.raises(ValueError, match="features.npz is damaged .*; a cache may be removed"):
        load(dataset, cheap)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_of_features_is_not_waited_for(tmp_path, cheap):
    dataset = make_dataset(tmp_path)
    os.mkfifo(tmp_path / "features.npz")
    with pytest.raises(OSError, match="features.npz is no plain file"):
        load(dataset, cheap)


# What is lacking, and the weights behind a cache


def test_the_weights_behind_a_cache_are_known_without_naming_them(tmp_path, cheap, decoded):
    dataset = make_dataset(tmp_path)
    about = load(dataset, cheap)[2]
    assert features.weights_behind(dataset, about) == str(cheap.resolve())
    assert features.weights_behind(dataset, "features in clip.npz, frozen") is None
    assert load(dataset, None)[2] == about and len(decoded) == 6


def test_all_that_is_lacking_is_said_before_anything_is_fetched(tmp_path, hub):
    dataset = make_dataset(tmp_path)
    obstacles, fetched = features.lacking(dataset)
    assert obstacles == [] and "ResNet-18's weights" in fetched[0] and "--weights" in fetched[0]
    dataset.path("red_shoe/1.png").unlink()
    obstacles, _ = features.lacking(dataset)
    where = f"{tmp_path}/images/ nor in {tmp_path}/"
    assert obstacles == [f"1 of 6 images found neither in {where}: red_shoe/1.png"]
    assert features.lacking(dataset, skip_broken=True)[0] == []
    obstacles, _ = features.lacking(dataset, weights=tmp_path / "none.pth", skip_broken=True)
    assert len(obstacles) == 1 and "none.pth" in obstacles[0]
    assert features.lacking(dataset, file="none.npz")[0] == ["no file of features none.npz"]
    for name in dataset.images["train"] + dataset.images["val"]:
        dataset.path(name).unlink(missing_ok=True)
    obstacles, fetched = features.lacking(dataset)
    assert "none of 6 images" in obstacles[0] and len(fetched) == 1


def test_a_heic_photo_without_its_plugin_says_which(tmp_path):
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (tmp_path / "b.jpg").write_bytes(b"")
    if ".heic" in data.photo_suffixes():
        pytest.skip("the plugin is installed")
    with pytest.raises(ValueError, match="a.heic .*`pip install pillow-heif`.*b.jpg .not an image"):
        features.extract([tmp_path / "a.heic", tmp_path / "b.jpg"], backbone="pixels")


def test_weights_beside_finished_features_are_looked_at_and_said_to_change_nothing(tmp_path):
    dataset = make_dataset(tmp_path)
    names = dataset.every_image
    np.savez(tmp_path / "mine.npz", files=names, features=np.ones((len(names), 3)))
    with pytest.raises(FileNotFoundError, match="no weights file .*nope.pth"):
        features.load_features(dataset, file=tmp_path / "mine.npz", weights=tmp_path / "nope.pth")
    (tmp_path / "some.pth").touch()
    dataset, _, _ = features.load_features(dataset, file=tmp_path / "mine.npz",
                                           weights=tmp_path / "some.pth")
    assert [note for note in dataset.notes if "--weights changes nothing" in note]
